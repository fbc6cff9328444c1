// Every function of CUDA that the fake offers begins here: it is counted, it can be made to fail,
// and after an error that lasts it fails for good. What the fake lacks ends here, by its name.
#pragma once
#include <map>
#include <string>

namespace fake {

// Counts a call; returns the code that it has to fail with, or 0.
int enter(const char *symbol);
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
  bool lasts;  // all that comes later fails as well, as after a kernel that went astray
};
void fail(const Failure &failure);
// Forgets all failures, also the one that lasts: a new device, as it were.
void recover();

// The first error that lasts stays until the test recovers.
void set_lasting_error(int code, const std::string &reason);
int lasting_error();

const char *error_name(int code);
// What a code means and, where this thread got it from a failure, whose failure that was.
const char *error_text(int code);

// Notes that the function that this thread is in has to wait for a device; counted if the thread
// has the interpreter's lock, because then every other Python thread waits too.
void note_wait();

std::map<std::string, long> call_counts();
std::map<std::string, long> refused_counts();
std::map<std::string, long> waits_with_gil();

// One copy of each text, for ever: names are kept and passed on as plain pointers.
const char *interned(const std::string &text);

}  // namespace fake

#define FAKE_ENTER()                                              \
  do {                                                            \
    if (int code_ = fake::enter(__func__)) return CUresult(code_); \
  } while (0)
#define FAKE_NEED(condition, otherwise) \
  do {                                  \
    if (!(condition)) return otherwise; \
  } while (0)
