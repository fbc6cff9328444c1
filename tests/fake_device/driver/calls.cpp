#include "calls.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <set>
#include <string_view>
#include <vector>

namespace fake {
namespace {

using Lock = std::lock_guard<std::mutex>;
// Found without a copy of the name: every call looks for its own.
using Counts = std::map<std::string, long, std::less<>>;

// Nothing here is ever destroyed: threads call while the process ends.
std::mutex &mutex = *new std::mutex;
Counts &calls = *new Counts;
Counts &refused = *new Counts;
Counts &waits = *new Counts;
std::vector<Failure> &failures = *new std::vector<Failure>;
std::string &lasting_reason = *new std::string;
std::atomic<int> lasting{0};

thread_local const char *symbol_of_thread = "no function of CUDA";
thread_local int failed_code = 0;
thread_local const char *failed_reason = "";

// A forked child has a copy of the streams and none of their threads: CUDA refuses to work there,
// and so does the fake. A process that has not used CUDA yet may fork as it likes.
std::atomic<bool> is_used{false}, is_forked{false};
[[maybe_unused]] const int at_fork =
    pthread_atfork(nullptr, nullptr, [] { is_forked = is_used.load(); });

// What works without a context works after an error that lasts.
bool needs_a_context(const char *symbol) {
  static const auto &others = *new std::set<std::string>{
      "cuInit", "cuDriverGetVersion", "cuGetProcAddress_v2", "cuGetExportTable", "cuDeviceGet",
      "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceGetUuid_v2", "cuDeviceGetAttribute",
      "cuDeviceTotalMem_v2", "cuDeviceGetPCIBusId", "cuDevicePrimaryCtxRetain",
      "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxGetState", "cuCtxGetCurrent",
      "cuCtxSetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuCtxGetDevice",
      "cuPointerGetAttribute", "cuStreamIsCapturing", "cuStreamGetCaptureInfo_v3",
      "cudaGetDeviceCount", "cudaGetDevice", "cudaSetDevice", "cudaGetDeviceProperties",
      "cudaGetDriverEntryPointByVersion", "cudaDriverGetVersion", "cudaRuntimeGetVersion",
      "cudaDeviceGetAttribute", "cudaPointerGetAttributes",
      "cudaStreamIsCapturing", "cudaStreamGetCaptureInfo"};
  return !others.count(symbol);
}

void count(Counts &counts, const char *name) {
  const auto found = counts.find(std::string_view(name));
  if (found != counts.end()) found->second++;
  else counts.emplace(name, 1);
}

int failed(int code, const std::string &reason) {
  failed_code = code;
  failed_reason = interned(reason);
  return code;
}

}  // namespace

const char *interned(const std::string &text) {
  static std::mutex &own = *new std::mutex;
  static auto &texts = *new std::set<std::string>;
  Lock lock(own);
  return texts.insert(text).first->c_str();
}

int enter(const char *symbol) {
  symbol_of_thread = symbol;
  // Before the lock: whoever held it in the parent does not exist in the child.
  if (is_forked) return failed(CUDA_ERROR_NOT_INITIALIZED, "a forked child cannot use CUDA");
  if (symbol == std::string_view("cuInit")) is_used = true;
  Lock lock(mutex);
  count(calls, symbol);
  auto due = std::find_if(failures.begin(), failures.end(), [&](Failure &one) {
    return one.symbol == symbol && one.after-- <= 0;
  });
  if (due != failures.end()) {
    const Failure failure = *due;
    if (!failure.is_every_call) failures.erase(due);
    const std::string reason = "the test made " + failure.symbol + " fail";
    if (failure.lasts && !lasting) {
      lasting_reason = reason;
      lasting = failure.code;
    }
    return failed(failure.code, reason);
  }
  if (lasting && needs_a_context(symbol)) return failed(lasting, lasting_reason);
  return 0;
}

void count_call(const char *name) {
  Lock lock(mutex);
  count(calls, name);
}

int refuse(const char *name) {
  {
    Lock lock(mutex);
    if (!refused[name]++)
      fprintf(stderr, "fake device: %s was called, which the fake does not do\n", name);
  }
  return failed(CUDA_ERROR_NOT_SUPPORTED, std::string("the fake device does not do ") + name);
}

const char *current_symbol() { return symbol_of_thread; }

bool is_forked_child() { return is_forked; }

void fail(const Failure &failure) {
  Lock lock(mutex);
  failures.push_back(failure);
}

void recover() {
  Lock lock(mutex);
  failures.clear();
  lasting = 0;
}

void set_lasting_error(int code, const std::string &reason) {
  Lock lock(mutex);
  if (lasting) return;
  fprintf(stderr, "fake device: %s\n", reason.c_str());
  lasting_reason = reason;
  lasting = code;
}

int lasting_error() {
  if (!lasting) return 0;
  Lock lock(mutex);
  return failed(lasting, lasting_reason);
}

const char *error_name(int code) {
  switch (code) {
#define NAMED(name) \
  case name: return #name
    NAMED(CUDA_SUCCESS);
    NAMED(CUDA_ERROR_INVALID_VALUE);
    NAMED(CUDA_ERROR_OUT_OF_MEMORY);
    NAMED(CUDA_ERROR_NOT_INITIALIZED);
    NAMED(CUDA_ERROR_NO_DEVICE);
    NAMED(CUDA_ERROR_INVALID_DEVICE);
    NAMED(CUDA_ERROR_INVALID_CONTEXT);
    NAMED(CUDA_ERROR_INVALID_HANDLE);
    NAMED(CUDA_ERROR_ILLEGAL_STATE);
    NAMED(CUDA_ERROR_NOT_FOUND);
    NAMED(CUDA_ERROR_NOT_READY);
    NAMED(CUDA_ERROR_ILLEGAL_ADDRESS);
    NAMED(CUDA_ERROR_ASSERT);
    NAMED(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    NAMED(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    NAMED(CUDA_ERROR_LAUNCH_FAILED);
    NAMED(CUDA_ERROR_NOT_SUPPORTED);
    NAMED(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    NAMED(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    NAMED(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    NAMED(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    NAMED(CUDA_ERROR_CAPTURED_EVENT);
#undef NAMED
    default: return interned("CUDA error " + std::to_string(code));
  }
}

const char *error_text(int code) {
  if (!code || code != failed_code) return error_name(code);
  return interned(std::string(error_name(code)) + " (fake device: " + failed_reason + ")");
}

void note_wait() {
  static const auto holds_gil = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
  static const auto is_running = (int (*)())dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  if (!holds_gil || !is_running || !is_running() || !holds_gil()) return;
  Lock lock(mutex);
  waits[symbol_of_thread]++;
}

std::map<std::string, long> call_counts() {
  Lock lock(mutex);
  return {calls.begin(), calls.end()};
}
std::map<std::string, long> refused_counts() {
  Lock lock(mutex);
  return {refused.begin(), refused.end()};
}
std::map<std::string, long> waits_with_gil() {
  Lock lock(mutex);
  return {waits.begin(), waits.end()};
}

}  // namespace fake
