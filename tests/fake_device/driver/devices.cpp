// The driver's functions about devices, contexts and itself.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "calls.h"
#include "contexts.h"
#include "memory.h"
#include "options.h"
#include "shield.h"
#include "streams.h"

struct CUctx_st {
  int device = 0;
  std::atomic<int> users{0};
};

namespace fake {
namespace {

thread_local std::vector<CUcontext> contexts;

bool is_device(int ordinal) { return ordinal >= 0 && ordinal < options().device_count; }

}  // namespace

CUcontext primary_context(int device) {
  static CUctx_st all[devices_max];
  all[device].device = device;
  return &all[device];
}

CUcontext current_context() { return contexts.empty() ? nullptr : contexts.back(); }

int current_device() { return contexts.empty() ? 0 : contexts.back()->device; }

}  // namespace fake

using namespace fake;

extern "C" {

CUresult cuInit(unsigned) {
  FAKE_ENTER();
  catch_faults();
  return options().device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}
CUresult cuDriverGetVersion(int *version) {
  FAKE_ENTER();
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

// --- devices

CUresult cuDeviceGetCount(int *count) {
  FAKE_ENTER();
  *count = options().device_count;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  FAKE_ENTER();
  FAKE_NEED(is_device(ordinal), CUDA_ERROR_INVALID_DEVICE);
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  FAKE_ENTER();
  FAKE_NEED(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  snprintf(name, size_t(length), "Fake device");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
  FAKE_ENTER();
  FAKE_NEED(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  memset(uuid, 0x10 + device, sizeof *uuid);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
  FAKE_ENTER();
  FAKE_NEED(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  snprintf(text, size_t(length), "0000:00:%02x.0", device + 1);
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
  FAKE_ENTER();
  FAKE_NEED(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  *bytes = options().memory_bytes;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  FAKE_ENTER();
  FAKE_NEED(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: *value = device + 1; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 4; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: *value = 1; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}

// --- contexts

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  FAKE_ENTER();
  FAKE_NEED(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  *context = primary_context(device);
  (*context)->users++;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  FAKE_ENTER();
  FAKE_NEED(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  FAKE_NEED(primary_context(device)->users-- > 0, CUDA_ERROR_INVALID_CONTEXT);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  FAKE_ENTER();
  FAKE_NEED(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  *flags = 0;
  *active = primary_context(device)->users > 0;
  return CUDA_SUCCESS;
}
// cuFile makes contexts of its own, by a name that the header of CUDA 13 lacks.
CUresult cuCtxCreate_v2(CUcontext *context, unsigned, CUdevice device) {
  FAKE_ENTER();
  FAKE_NEED(is_device(device), CUDA_ERROR_INVALID_DEVICE);
  *context = new CUctx_st;
  (*context)->device = device;
  contexts.push_back(*context);
  return CUDA_SUCCESS;
}
// What was a context stays readable: another thread may have it as its current one.
CUresult cuCtxDestroy(CUcontext context) {
  FAKE_ENTER();
  FAKE_NEED(context, CUDA_ERROR_INVALID_CONTEXT);
  if (current_context() == context) contexts.pop_back();
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  FAKE_ENTER();
  *context = current_context();
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  FAKE_ENTER();
  if (!contexts.empty()) contexts.pop_back();
  if (context) contexts.push_back(context);
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) {
  FAKE_ENTER();
  FAKE_NEED(context, CUDA_ERROR_INVALID_CONTEXT);
  contexts.push_back(context);
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext *context) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  if (context) *context = current_context();
  contexts.pop_back();
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *device) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  *device = current_device();
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize(void) {
  FAKE_ENTER();
  FAKE_NEED(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  return CUresult(synchronize_device(current_device()));
}
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  FAKE_ENTER();
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetApiVersion(CUcontext, unsigned *version) {
  FAKE_ENTER();
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

// --- the driver itself

CUresult cuGetErrorName(CUresult code, const char **text) {
  *text = error_name(code);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult code, const char **text) {
  *text = error_text(code);
  return CUDA_SUCCESS;
}
CUresult cuLogsRegisterCallback(CUlogsCallback, void *, CUlogsCallbackHandle *handle) {
  FAKE_ENTER();
  if (handle) *handle = nullptr;  // nothing is ever logged
  return CUDA_SUCCESS;
}
CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) {
  FAKE_ENTER();
  return CUDA_SUCCESS;
}
CUresult cuGetProcAddress(const char *name, void **function, int, cuuint64_t,
                          CUdriverProcAddressQueryResult *status) {
  FAKE_ENTER();
  // Without a version in its name, the newest one of which the fake has.
  *function = nullptr;
  for (const char *version : {"_v3", "_v2", ""})
    if (!*function) *function = dlsym(RTLD_DEFAULT, (std::string(name) + version).c_str());
  if (status)
    *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
}
