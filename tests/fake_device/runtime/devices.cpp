// The runtime's functions about devices, errors and the library itself.
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_thread = 0;

CUresult no_such_function() { return CUresult(fake::refuse("a function unknown to cuda.h")); }

}  // namespace

namespace fake {

cudaError_t note(int code) {
  // That something is not over yet is an answer and no error.
  if (code && code != cudaErrorNotReady) last_error = cudaError_t(code);
  return cudaError_t(code);
}

void need_context() {
  CUcontext context = nullptr;
  cuCtxGetCurrent(&context);
  if (!context && !cuDevicePrimaryCtxRetain(&context, device_of_thread)) cuCtxSetCurrent(context);
}

}  // namespace fake

using fake::note;

extern "C" {

cudaError_t cudaGetDeviceCount(int *count) {
  RUNTIME_ENTER_BARE();
  if (int code = cuInit(0)) return note(code);
  return note(cuDeviceGetCount(count));
}
cudaError_t cudaGetDevice(int *ordinal) {
  RUNTIME_ENTER_BARE();
  *ordinal = device_of_thread;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int ordinal) {
  RUNTIME_ENTER_BARE();
  CUcontext context;
  if (int code = cuDevicePrimaryCtxRetain(&context, ordinal)) return note(code);
  device_of_thread = ordinal;
  return note(cuCtxSetCurrent(context));
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int ordinal) {
  RUNTIME_ENTER();
  memset(properties, 0, sizeof *properties);
  size_t total;
  if (int code = cuDeviceTotalMem(&total, ordinal)) return note(code);
  cuDeviceGetName(properties->name, sizeof properties->name, ordinal);
  properties->totalGlobalMem = total;
  properties->major = 9;
  properties->multiProcessorCount = 4;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerMultiprocessor = 233472;
  for (int &size : properties->maxGridSize) size = 65535;
  for (int &size : properties->maxThreadsDim) size = 1024;
  properties->pciBusID = ordinal + 1;
  properties->unifiedAddressing = properties->canMapHostMemory = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int ordinal) {
  RUNTIME_ENTER();
  return note(cuDeviceGetAttribute(value, CUdevice_attribute(attribute), ordinal));
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
  RUNTIME_ENTER();
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int ordinal) {
  RUNTIME_ENTER();
  return note(cuDeviceGetPCIBusId(text, length, ordinal));
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  RUNTIME_ENTER();
  return note(cuCtxGetStreamPriorityRange(least, greatest));
}
cudaError_t cudaDeviceSynchronize(void) {
  RUNTIME_ENTER();
  return note(cuCtxSynchronize());
}
cudaError_t cudaDriverGetVersion(int *version) {
  RUNTIME_ENTER_BARE();
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
  RUNTIME_ENTER_BARE();
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// --- errors; these cannot fail themselves

cudaError_t cudaGetLastError(void) {
  const cudaError_t code = last_error;
  last_error = cudaError_t(fake::lasting_error());
  return code;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(cudaError_t code) { return fake::error_name(code); }
const char *cudaGetErrorString(cudaError_t code) { return fake::error_text(code); }

// PyTorch asks for functions of the driver by this one, and calls what it gets without a check.
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *status) {
  RUNTIME_ENTER_BARE();
  CUdriverProcAddressQueryResult found;
  if (cuGetProcAddress(name, function, 0, 0, &found)) *function = (void *)no_such_function;
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
