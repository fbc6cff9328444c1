// The host's own accesses: to pinned memory, which it must not touch while a device may, and to
// memory of a device, which it must not touch at all.
//
// Pages of pinned memory that an operation of the device writes, and which the host has not seen to
// be over, are taken away from the host; pages that one reads are made read-only. Whoever comes too
// early runs into a fault: it is reported as a race, and the access goes on.
#pragma once
#include <functional>

#include "memory.h"

namespace fake {

// Puts the pages of a pinned region in the state that its accesses ask for. With `order` held.
void set_shield(Region &region);

// Takes the process's handler of faults. Later calls do nothing.
void catch_faults();

// Runs a kernel. If it touches what is not mapped, it ends there, and this returns false; whatever
// it held is lost.
bool run_guarded(const std::function<void()> &kernel);

}  // namespace fake
