// What the fake offers to the rest of the tests, beyond CUDA's own functions.
#pragma once
#include <cuda.h>

#include <functional>
#include <vector>

#include "races.h"

namespace fake {

// Gives a stream a kernel of the host to run in its turn. It reaches device memory by aliases. An
// exception of its ends as an error of the device that lasts.
int launch_kernel(CUstream stream, const char *name, std::vector<Access> accesses,
                  std::function<void()> kernel);

}  // namespace fake

// For Python, by ctypes. Texts hold one entry in each line, and are the caller's to free.
extern "C" {
void fake_set_option(const char *name, long value);
void fake_set_lag(const char *kind, long us_max);
void fake_set_lag_seed(long seed);
void fake_hold(const char *kind);
void fake_hold_stream(void *stream);
void fake_release(const char *kind);
void fake_release_stream(void *stream);
void fake_release_all(void);
void fake_fail(const char *symbol, int code, long after, int is_every_call);
void fake_recover(void);
void fake_time_calls(int is_on);
long fake_ns_in_calls(void);
long fake_ns_without_lock(void);
char *fake_take_races(void);
char *fake_calls(void);
char *fake_refused(void);
char *fake_waits_with_gil(void);
void fake_free(char *text);
}
