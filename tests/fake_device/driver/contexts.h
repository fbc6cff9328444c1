// Contexts: one for each device, the primary one, and a stack of current ones for each thread.
#pragma once
#include <cuda.h>

namespace fake {

constexpr int devices_max = 8;

CUcontext primary_context(int device);
// Null if this thread has none.
CUcontext current_context();
// The device of the current context; the first one if there is none.
int current_device();

}  // namespace fake
