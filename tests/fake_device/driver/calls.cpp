#include "calls.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <set>
#include <string_view>
#include <vector>

namespace fake {

struct Symbol {
  explicit Symbol(std::string_view name);
  const bool needs_context, begins_use;
  std::atomic<long> count{0};
};

namespace {

using Lock = std::lock_guard<std::mutex>;
using Counts = std::map<std::string, long>;

// Nothing here is ever destroyed: threads call while the process ends.
std::mutex &mutex = *new std::mutex;
std::map<std::string, Symbol, std::less<>> &symbols =
    *new std::map<std::string, Symbol, std::less<>>;
Counts &refused = *new Counts;
Counts &waits = *new Counts;
std::vector<Failure> &failures = *new std::vector<Failure>;
std::atomic<bool> has_failures{false};  // asked without the lock: mostly there are none
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
bool needs_a_context(const std::string &symbol) {
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

}  // namespace

Symbol::Symbol(std::string_view name)
    : needs_context(needs_a_context(std::string(name))), begins_use(name == "cuInit") {}

namespace {

// With the lock held.
Symbol &symbol_named(std::string_view name) {
  const auto found = symbols.find(name);
  return found != symbols.end() ? found->second
                                : symbols.try_emplace(std::string(name), name).first->second;
}

Symbol &symbol_of(Site &site) {
  if (Symbol *known = site.symbol.load(std::memory_order_acquire)) return *known;
  Lock lock(mutex);
  Symbol &found = symbol_named(site.name);
  site.symbol.store(&found, std::memory_order_release);
  return found;
}

// What the clock tells of nothing: the time between two looks at it, one right after the other.
int64_t look_twice_ns() {
  int64_t least = INT64_MAX;
  for (int i = 0; i < 100; i++) {
    const int64_t before = now_ns();
    least = std::min(least, now_ns() - before);
  }
  return least;
}

thread_local int64_t ns_of_thread = 0;
thread_local bool is_thread_timed = false;

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

int enter(Site &site) {
  symbol_of_thread = site.name;
  // Before the lock: whoever held it in the parent does not exist in the child.
  if (is_forked) return failed(CUDA_ERROR_NOT_INITIALIZED, "a forked child cannot use CUDA");
  Symbol &symbol = symbol_of(site);
  if (symbol.begins_use) is_used = true;
  symbol.count.fetch_add(1, std::memory_order_relaxed);
  const bool may_fail = lasting && symbol.needs_context;
  if (!may_fail && !has_failures) return 0;
  Lock lock(mutex);
  auto due = std::find_if(failures.begin(), failures.end(), [&](Failure &one) {
    return one.symbol == site.name && one.after-- <= 0;
  });
  if (due != failures.end()) {
    const Failure failure = *due;
    if (!failure.is_every_call) failures.erase(due);
    has_failures = !failures.empty();
    return failed(failure.code, "the test made " + failure.symbol + " fail");
  }
  if (lasting && symbol.needs_context) return failed(lasting, lasting_reason);
  return 0;
}

void count_call(const char *name) {
  Lock lock(mutex);
  symbol_named(name).count++;
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
  has_failures = true;
}

void recover() {
  Lock lock(mutex);
  failures.clear();
  has_failures = false;
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

int64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

constinit std::atomic<bool> are_calls_timed{false};

void time_calls(bool is_on) { are_calls_timed = is_on; }

int64_t ns_in_calls() { return ns_of_thread; }

void Stopwatch::begin() {
  if (is_thread_timed) return;
  is_thread_timed = true;
  began_ns_ = now_ns();
}

void Stopwatch::end() {
  const int64_t took_ns = now_ns() - began_ns_;
  static const int64_t looks_ns = look_twice_ns();
  ns_of_thread += took_ns - looks_ns;
  is_thread_timed = false;
}

std::map<std::string, long> call_counts() {
  Lock lock(mutex);
  std::map<std::string, long> counts;
  for (const auto &[name, symbol] : symbols)
    if (symbol.count) counts[name] = symbol.count;
  return counts;
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
