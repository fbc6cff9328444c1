// cuFile without GPUDirect Storage hardware: `libcufile.so.0` over the fake driver, for tests.
//
// What a file of a real drive would be given directly goes through memory of the host here. It is
// stricter than NVIDIA's library: only registered memory and files that have a name are taken. Any
// function can be made to fail, by a test (`fake_cufile_fail`) or, in a child process that a test
// does not reach, by the variable SSDTRAIN_FAKE_CUFILE ("cuFileDriverOpen:hang", "NAME:CODE").
#include <cuda.h>
#include <cufile.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#undef cuFileDriverClose

namespace {

struct Failure {
  int code;
  long after;
  bool is_every_call;
};

// What a test can have a transfer do besides failing.
constexpr int moves_half = 1, moves_nothing = 2;
constexpr size_t between_bytes = 1 << 20;
// O_LARGEFILE as the kernel tells it; the C library's is 0 where all files are large.
constexpr int kernels_large_file = 0100000;

std::mutex &books = *new std::mutex;
std::map<std::string, Failure> &failures = *new std::map<std::string, Failure>;
std::map<std::string, long> &calls = *new std::map<std::string, long>;
std::map<uintptr_t, size_t> &buffers = *new std::map<uintptr_t, size_t>;
std::map<int, bool> &handles = *new std::map<int, bool>;
bool is_open, allows_compat = true;

[[noreturn]] void refuse(const char *why) {
  fprintf(stderr, "fake cuFile: %s\n", why);
  abort();
}

// What the variable says of a function.
int told_by_variable(const char *name) {
  const char *told = getenv("SSDTRAIN_FAKE_CUFILE");
  const size_t length = strlen(name);
  if (!told || strncmp(told, name, length) || told[length] != ':') return 0;
  while (!strcmp(told + length + 1, "hang")) pause();
  return atoi(told + length + 1);
}

// Counts a call; returns how it shall fail, or 0.
int enter(const char *name) {
  if (const int code = told_by_variable(name)) return code;
  std::lock_guard lock(books);
  calls[name]++;
  const auto found = failures.find(name);
  if (found == failures.end()) return 0;
  Failure &failure = found->second;
  if (!failure.is_every_call && failure.after-- != 0) return 0;
  return failure.code;
}

CUfileError_t status(int code) { return {CUfileOpError(code), CUDA_SUCCESS}; }

// Pinned memory and a stream of this thread, in each context; they live as long as the process.
struct Between {
  char *memory = nullptr;
  CUstream stream = nullptr;
};

Between *between() {
  thread_local std::map<CUcontext, Between> all;
  CUcontext context = nullptr;
  if (cuCtxGetCurrent(&context) || !context) return nullptr;
  Between &one = all[context];
  if (!one.memory && (cuMemHostAlloc((void **)&one.memory, between_bytes, 0) ||
                      cuStreamCreate(&one.stream, CU_STREAM_NON_BLOCKING)))
    return nullptr;
  return &one;
}

ssize_t failed(int code) {
  errno = code;
  return -1;
}

int file_of(CUfileHandle_t handle) {
  std::lock_guard lock(books);
  const int file = int(uintptr_t(handle)) - 1;
  return handles.count(file) ? file : -1;
}

bool is_registered(const void *base, off_t start, size_t size) {
  std::lock_guard lock(books);
  const auto found = buffers.find(uintptr_t(base));
  return found != buffers.end() && start >= 0 && size_t(start) + size <= found->second;
}

// Moves bytes piece by piece, each through the host's memory; returns how many, or -1.
template <class Piece>
ssize_t move(int code, CUfileHandle_t handle, const void *base, size_t size, off_t start,
             Piece piece) {
  if (code < 0) return code;
  if (code == moves_nothing) return 0;
  if (code == moves_half) size /= 2;
  else if (code) return failed(code);
  const int file = file_of(handle);
  if (file < 0) return failed(CU_FILE_HANDLE_NOT_REGISTERED);
  if (!is_registered(base, start, size)) return failed(CU_FILE_MEMORY_NOT_REGISTERED);
  Between *way = between();
  if (!way) return failed(EIO);
  for (size_t done = 0; done < size;) {
    const size_t now = std::min(between_bytes, size - done);
    if (piece(file, *way, CUdeviceptr(base) + start + done, done, now)) return failed(EIO);
    done += now;
  }
  return ssize_t(size);
}

}  // namespace

extern "C" {

void fake_cufile_fail(const char *name, int code, long after, int is_every_call) {
  std::lock_guard lock(books);
  failures[name] = {code, after, is_every_call != 0};
}
void fake_cufile_recover(void) {
  std::lock_guard lock(books);
  failures.clear();
}
long fake_cufile_calls(const char *name) {
  std::lock_guard lock(books);
  return calls[name];
}
// How many files and buffers are registered.
long fake_cufile_registered(void) {
  std::lock_guard lock(books);
  return long(handles.size() + buffers.size());
}

CUfileError_t cuFileDriverOpen(void) {
  if (const int code = enter("cuFileDriverOpen")) return status(code);
  if (!getenv("CUFILE_LOGFILE_PATH")) refuse("opened before it was told where its log goes");
  is_open = true;
  return status(CU_FILE_SUCCESS);
}
CUfileError_t cuFileDriverClose(void) { refuse("one user closed it for all"); }
CUfileError_t cuFileDriverClose_v2(void) { refuse("one user closed it for all"); }

CUfileError_t cuFileSetParameterBool(CUFileBoolConfigParameter_t parameter, bool value) {
  if (const int code = enter("cuFileSetParameterBool")) return status(code);
  if (is_open) return status(CU_FILE_DRIVER_ALREADY_OPEN);
  if (parameter == CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE) allows_compat = value;
  return status(CU_FILE_SUCCESS);
}
CUfileError_t cuFileGetVersion(int *version) {
  if (const int code = enter("cuFileGetVersion")) return status(code);
  *version = 1170;
  return status(CU_FILE_SUCCESS);
}
CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t *properties) {
  if (const int code = enter("cuFileDriverGetProperties")) return status(code);
  *properties = {};
  properties->nvfs.dcontrolflags = unsigned(allows_compat) << CU_FILE_ALLOW_COMPAT_MODE;
  return status(CU_FILE_SUCCESS);
}

CUfileError_t cuFileHandleRegister(CUfileHandle_t *handle, CUfileDescr_t *description) {
  if (const int code = enter("cuFileHandleRegister")) return status(code);
  if (!is_open) return status(CU_FILE_DRIVER_NOT_INITIALIZED);
  const int file = description->handle.fd;
  struct stat facts;
  if (description->type != CU_FILE_HANDLE_TYPE_OPAQUE_FD || description->fs_ops ||
      fstat(file, &facts))
    return status(CU_FILE_INVALID_VALUE);
  // The real one opens the file a second time by its name.
  if (!facts.st_nlink) return status(CU_FILE_INVALID_FILE_OPEN_FLAG);
  const int flags = fcntl(file, F_GETFL);
  if (!(flags & O_DIRECT)) return status(CU_FILE_DIO_NOT_SET);
  // A flag of the file that has nothing to do with its bytes, as O_NOFOLLOW, is refused too.
  if (flags & ~(O_ACCMODE | O_DIRECT | kernels_large_file))
    return status(CU_FILE_INVALID_FILE_OPEN_FLAG);
  std::lock_guard lock(books);
  if (!handles.emplace(file, true).second) return status(CU_FILE_HANDLE_ALREADY_REGISTERED);
  *handle = CUfileHandle_t(uintptr_t(file) + 1);
  return status(CU_FILE_SUCCESS);
}
void cuFileHandleDeregister(CUfileHandle_t handle) {
  enter("cuFileHandleDeregister");
  const int file = file_of(handle);
  if (file < 0 || fcntl(file, F_GETFD) < 0) refuse("a file was closed before its registration");
  std::lock_guard lock(books);
  handles.erase(file);
}

CUfileError_t cuFileBufRegister(const void *memory, size_t size, int) {
  if (const int code = enter("cuFileBufRegister")) return status(code);
  unsigned kind = 0;
  if (cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CUdeviceptr(memory)) ||
      kind != CU_MEMORYTYPE_DEVICE)
    return status(CU_FILE_CUDA_MEMORY_TYPE_INVALID);
  std::lock_guard lock(books);
  const bool is_new = buffers.emplace(uintptr_t(memory), size).second;
  return status(is_new ? CU_FILE_SUCCESS : CU_FILE_MEMORY_ALREADY_REGISTERED);
}
CUfileError_t cuFileBufDeregister(const void *memory) {
  if (const int code = enter("cuFileBufDeregister")) return status(code);
  std::lock_guard lock(books);
  return status(buffers.erase(uintptr_t(memory)) ? CU_FILE_SUCCESS
                                                 : CU_FILE_MEMORY_NOT_REGISTERED);
}

ssize_t cuFileWrite(CUfileHandle_t handle, const void *base, size_t size, off_t at, off_t start) {
  const int code = enter("cuFileWrite");
  return move(code, handle, base, size, start,
              [at](int file, Between &way, CUdeviceptr from, size_t done, size_t now) {
                return cuMemcpyDtoHAsync(way.memory, from, now, way.stream) ||
                       cuStreamSynchronize(way.stream) ||
                       pwrite(file, way.memory, now, at + off_t(done)) != ssize_t(now);
              });
}
ssize_t cuFileRead(CUfileHandle_t handle, void *base, size_t size, off_t at, off_t start) {
  const int code = enter("cuFileRead");
  return move(code, handle, base, size, start,
              [at](int file, Between &way, CUdeviceptr to, size_t done, size_t now) {
                return pread(file, way.memory, now, at + off_t(done)) != ssize_t(now) ||
                       cuMemcpyHtoDAsync(to, way.memory, now, way.stream) ||
                       cuStreamSynchronize(way.stream);
              });
}
}
