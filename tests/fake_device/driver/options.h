// What a test chooses about the device: how many, how large, how slow, and what stands still.
#pragma once
#include <stddef.h>

#include <string>

namespace fake {

struct Options {
  int device_count = 1;           // or what SSDTRAIN_FAKE_DEVICES says, for child processes
  size_t memory_bytes = size_t(4) << 30;
  bool is_host_watched = true;    // whether the host's own accesses to pinned memory are seen
  long patience_s = 60;           // how long the host waits for a device before that is a hang
};
// Set before the first function of CUDA is called.
Options &options();

}  // namespace fake
