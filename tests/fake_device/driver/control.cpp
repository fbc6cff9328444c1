#include "control.h"

#include <cstdlib>
#include <cstring>

#include "calls.h"
#include "lag.h"
#include "memory.h"
#include "options.h"
#include "shield.h"
#include "streams.h"

namespace fake {
namespace {

char *lines_of(const std::map<std::string, long> &counts) {
  std::string text;
  for (const auto &[name, count] : counts) text += name + " " + std::to_string(count) + "\n";
  return strdup(text.c_str());
}

int number_of(void *stream) {
  const CUstream found = resolve(CUstream(stream));
  return found ? found->number : no_stream;
}

}  // namespace

int launch_kernel(CUstream stream, const char *name, std::vector<Access> accesses,
                  std::function<void()> kernel) {
  static constinit Site site{"cudaLaunchKernel"};
  if (const int code = enter(site)) return code;
  stream = resolve(stream);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  for (Access &access : accesses) access.who = name;
  const int number = stream->number;
  const auto run = [=] {
    wait_for_turn(kind::kernels, number);
    const std::string began = std::string(name) + " failed on its stream: ";
    try {
      if (run_guarded(kernel)) return 0;
    } catch (const std::exception &error) {
      set_lasting_error(CUDA_ERROR_ASSERT, began + error.what());
      return 0;
    }
    set_lasting_error(CUDA_ERROR_ILLEGAL_ADDRESS, began + "it touched memory that is not there");
    return 0;
  };
  return enqueue(stream, {run, std::move(accesses)});
}

}  // namespace fake

using namespace fake;

extern "C" {

void fake_set_option(const char *name, long value) {
  const std::string option = name;
  if (option == "device_count") options().device_count = int(value);
  else if (option == "memory_bytes") options().memory_bytes = size_t(value);
  else if (option == "is_host_watched") options().is_host_watched = value;
  else if (option == "patience_s") options().patience_s = value;
  else abort();
}
void fake_set_lag(const char *kind, long us_max) { set_lag(kind, us_max); }
void fake_set_lag_seed(long seed) { set_lag_seed(seed); }
void fake_hold(const char *kind) { hold(kind); }
void fake_hold_stream(void *stream) { hold_stream(number_of(stream)); }
void fake_release(const char *kind) { release(kind); }
void fake_release_stream(void *stream) { release_stream(number_of(stream)); }
void fake_release_all(void) { release_all(); }
void fake_fail(const char *symbol, int code, long after, int is_every_call) {
  fail({symbol, code, after, is_every_call != 0});
}
void fake_recover(void) { recover(); }
void fake_time_calls(int is_on) { time_calls(is_on != 0); }
long fake_ns_in_calls(void) { return long(ns_in_calls()); }
long fake_ns_without_lock(void) { return long(ns_without_lock()); }
char *fake_take_races(void) {
  std::string text;
  for (const std::string &race : take_races()) text += race + "\n";
  return strdup(text.c_str());
}
char *fake_calls(void) { return lines_of(call_counts()); }
char *fake_refused(void) { return lines_of(refused_counts()); }
char *fake_waits_with_gil(void) { return lines_of(waits_with_gil()); }
void fake_free(char *text) { free(text); }
}
