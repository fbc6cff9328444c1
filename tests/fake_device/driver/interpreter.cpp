// How long a thread of Python is without the interpreter's lock. Preloaded, these take the place of
// the interpreter's functions of the same names for all who give the lock up by them, if the
// interpreter is a library of its own. They hand over to the real ones.
#include <dlfcn.h>

#include "calls.h"

namespace {

thread_local int64_t given_up_ns = 0;
thread_local int64_t without_ns = 0;

}  // namespace

namespace fake {

int64_t ns_without_lock() { return without_ns; }

}  // namespace fake

extern "C" {

void *PyEval_SaveThread() {
  static const auto real = (void *(*)())dlsym(RTLD_NEXT, "PyEval_SaveThread");
  void *const state = real();
  if (fake::are_calls_timed.load(std::memory_order_relaxed)) given_up_ns = fake::now_ns();
  return state;
}

void PyEval_RestoreThread(void *state) {
  static const auto real = (void (*)(void *))dlsym(RTLD_NEXT, "PyEval_RestoreThread");
  real(state);
  if (given_up_ns) without_ns += fake::now_ns() - given_up_ns;
  given_up_ns = 0;
}
}
