// The memory that the driver knows: the device's, and pinned memory of the host.
//
// Memory of the device is mapped twice: at the address that CUDA hands out, where nobody may touch
// it, and at an alias, by which copies and kernels reach it. A range that was given back is never
// handed out again, so that whoever still uses it is caught.
#pragma once
#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "races.h"

namespace fake {

enum class Place { device, pinned };

// Pages of pinned memory that the host must not write (1) or not touch (2) for now.
struct Shield {
  Span pages;
  int level;
};

struct Region {
  Span bytes;
  Place place;
  int device;
  // The same bytes where nothing protects them. Null for private memory that the host brought: a
  // second mapping of it cannot be had, and the file of the process's memory takes its place.
  char *alias = nullptr;
  bool is_ours = false;  // mapped by the driver, which gives it back
  std::vector<Access> accesses = {};
  std::vector<Shield> shields = {};
};

// Whether there ever was any; may be asked at any time, also while libraries are loaded.
extern std::atomic<bool> has_memory;

// By their ends. With `order` held.
extern std::map<uintptr_t, Region> &regions;
Region *find_region(uintptr_t address);
// Where an address lies, in words. With `order` held.
std::string place_of(uintptr_t address);
// Whether it lay on a device and was given back. With `order` held.
bool was_freed(uintptr_t address);

// These take `order` themselves, and give codes of CUDA back.
int allocate_on_device(uintptr_t *address, size_t size, int device);
int free_on_device(uintptr_t address);
int allocate_pinned(uintptr_t *address, size_t size, int device);
int register_pinned(uintptr_t address, size_t size, int device);
int release_pinned(uintptr_t address);
size_t bytes_free(int device);

// Where code of the fake finds the bytes at an address of CUDA.
char *alias_of(uintptr_t address);
// Moves bytes as a device does, whatever keeps the host from them.
void move_bytes(uintptr_t target, uintptr_t source, size_t size);
void fill_bytes(uintptr_t target, unsigned char value, size_t size);

}  // namespace fake
