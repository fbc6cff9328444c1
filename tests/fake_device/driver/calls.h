// Every function of CUDA that the fake offers begins here: it is counted, it can be made to fail,
// and after an error that lasts it fails for good. What the fake lacks ends here, by its name.
#pragma once
#include <stdint.h>

#include <atomic>
#include <map>
#include <string>

namespace fake {

// What is known of one function, for all places that have its name.
struct Symbol;

// The body of a function of CUDA; looks itself up at its first call. Without a constructor that
// runs, and so without a lock that a forked child might find taken.
struct Site {
  const char *name;
  std::atomic<Symbol *> symbol{nullptr};
  constexpr explicit Site(const char *function) : name(function) {}
};

// Counts a call; returns the code that it has to fail with, or 0.
int enter(Site &site);
// Counts a call of something else that the fake watches.
void count_call(const char *name);

// Ends a call of something that the fake does not do. Says so, once for each name.
int refuse(const char *name);

// The function of CUDA that this thread called last.
const char *current_symbol();

// Whether the process that used the device is another one, of which this is a copy.
bool is_forked_child();

struct Failure {
  std::string symbol;
  int code;
  long after;  // how many calls go well before
  bool is_every_call;
};
void fail(const Failure &failure);
// Forgets all failures, also that of a kernel, which lasts: a new device, as it were.
void recover();

// The first error of a kernel stays until the test recovers.
void set_lasting_error(int code, const std::string &reason);
int lasting_error();

const char *error_name(int code);
// What a code means and, where this thread got it from a failure, whose failure that was.
const char *error_text(int code);

// Notes that the function that this thread is in has to wait for a device; counted if the thread
// has the interpreter's lock, because then every other Python thread waits too.
void note_wait();

// Counts from now on how long each thread is in functions of CUDA, and without the interpreter's
// lock.
void time_calls(bool is_on);
// How long this thread was in them while that was on, without what they do later on a stream.
int64_t ns_in_calls();

// How long this thread had given the lock up while that was on; see `interpreter.cpp`.
int64_t ns_without_lock();

int64_t now_ns();

extern constinit std::atomic<bool> are_calls_timed;

// Times the function that it is in, unless another one of CUDA called that.
class Stopwatch {
 public:
  Stopwatch() {
    if (are_calls_timed.load(std::memory_order_relaxed)) begin();
  }
  ~Stopwatch() {
    if (began_ns_) end();
  }
  Stopwatch(const Stopwatch &) = delete;
  Stopwatch &operator=(const Stopwatch &) = delete;

 private:
  void begin();
  void end();
  int64_t began_ns_ = 0;
};

std::map<std::string, long> call_counts();
std::map<std::string, long> refused_counts();
std::map<std::string, long> waits_with_gil();

// One copy of each text, for ever: names are kept and passed on as plain pointers.
const char *interned(const std::string &text);

}  // namespace fake

// The two lines with which a function begins that the fake offers.
#define FAKE_SITE()                               \
  static constinit fake::Site site_{__func__};    \
  [[maybe_unused]] const fake::Stopwatch stopwatch_
#define FAKE_ENTER() \
  FAKE_SITE();       \
  if (int code_ = fake::enter(site_)) return CUresult(code_)
#define FAKE_NEED(condition, otherwise) \
  do {                                  \
    if (!(condition)) return otherwise; \
  } while (0)
