#include "memory.h"

#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "options.h"
#include "shield.h"

namespace fake {

std::map<uintptr_t, Region> &regions = *new std::map<uintptr_t, Region>;
constinit std::atomic<bool> has_memory{false};

namespace {

constexpr size_t device_unit_bytes = 2 << 20, page_bytes = 4096, guard_bytes = 1 << 16;
// What new memory holds: a large negative number, as an index and as a float.
constexpr int garbage = 0xcd;

std::map<uintptr_t, Span> &freed = *new std::map<uintptr_t, Span>;  // by their ends
std::map<int, size_t> &used_bytes = *new std::map<int, size_t>;

uintptr_t rounded_up(uintptr_t value, uintptr_t unit) { return (value + unit - 1) / unit * unit; }

void *map(void *address, size_t size, int protection, int flags, int file) {
  return mmap(address, size, protection, flags, file, 0);
}

// Addresses that nobody else is given, and nobody may touch.
uintptr_t reserved(size_t size) {
  void *begin = map(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  return begin == MAP_FAILED ? 0 : uintptr_t(begin);
}

// Puts a file where addresses were reserved, if they were.
bool is_mapped_at(uintptr_t begin, size_t size, int protection, int file) {
  return begin > guard_bytes &&
         map((void *)begin, size, protection, MAP_SHARED | MAP_FIXED, file) != MAP_FAILED;
}

// A file in memory that can be mapped more than once; -1 if there is none to be had.
int memory_file(const char *name, size_t size) {
  const int file = memfd_create(name, MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, off_t(size)) == 0) return file;
  close(file);
  return -1;
}

// This process's memory as a file, by which protected pages can be read and written; -1 where the
// kernel does not allow that.
int process_memory() {
  static const int file = [] {
    const int opened = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    void *page = map(nullptr, page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    const char byte = 1;
    const bool works = opened >= 0 && page != MAP_FAILED &&
                       syscall(SYS_pwrite64, opened, &byte, 1, off_t(page)) == 1;
    munmap(page, page_bytes);
    return works ? opened : -1;
  }();
  return file;
}

// A system call of our own: `pread64` of the C library is one of those that the fake watches.
void move_by_file(long call, uintptr_t protected_bytes, void *others, size_t size) {
  for (size_t done = 0; done < size;) {
    const long moved = syscall(call, process_memory(), (char *)others + done, size - done,
                               off_t(protected_bytes + done));
    if (moved <= 0) {
      fprintf(stderr, "fake device: pinned memory at %#lx cannot be reached: %s; was it unmapped "
              "while it was registered?\n", protected_bytes + done, strerror(errno));
      abort();
    }
    done += size_t(moved);
  }
}

// With `order` held.
void keep(Region region) {
  const uintptr_t end = region.bytes.end;
  regions[end] = std::move(region);
  has_memory = true;
}

const Region *region_at(const std::map<uintptr_t, Region> &all, uintptr_t address) {
  const auto found = all.upper_bound(address);
  return found != all.end() && found->second.bytes.begin <= address ? &found->second : nullptr;
}

// Null where only the file of the process's memory leads.
char *direct(uintptr_t address) {
  Lock lock(order);
  const Region *region = region_at(regions, address);
  if (!region) return (char *)address;
  return region->alias ? region->alias + (address - region->bytes.begin) : nullptr;
}

}  // namespace

Region *find_region(uintptr_t address) { return const_cast<Region *>(region_at(regions, address)); }

bool was_freed(uintptr_t address) {
  const auto found = freed.upper_bound(address);
  return found != freed.end() && found->second.begin <= address;
}

std::string place_of(uintptr_t address) {
  const Region *region = find_region(address);
  if (!region) return "memory that the driver does not know";
  const Span &bytes = region->bytes;
  return "byte " + std::to_string(address - bytes.begin) + " of " +
         std::to_string(bytes.end - bytes.begin) +
         (region->place == Place::device ? " on device " + std::to_string(region->device)
                                         : std::string(" of pinned memory"));
}

size_t bytes_free(int device) {
  Lock lock(order);
  return options().memory_bytes - used_bytes[device];
}

int allocate_on_device(uintptr_t *address, size_t size, int device) {
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  if (size > options().memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const size_t bytes = rounded_up(size, device_unit_bytes);
  Lock lock(order);
  if (used_bytes[device] + bytes > options().memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = memory_file("memory of the fake device", bytes);
  if (file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  // Wider ranges: one begins at a whole unit, as real addresses do, and the other is an alias with
  // guards on both sides, so that a kernel that goes astray hits no memory of somebody else.
  const uintptr_t begin = rounded_up(reserved(bytes + device_unit_bytes), device_unit_bytes);
  const uintptr_t alias = reserved(bytes + 2 * guard_bytes) + guard_bytes;
  const bool is_mapped = is_mapped_at(begin, bytes, PROT_NONE, file) &&
                         is_mapped_at(alias, bytes, PROT_READ | PROT_WRITE, file);
  close(file);
  if (!is_mapped) return CUDA_ERROR_OUT_OF_MEMORY;
  memset((char *)alias, garbage, bytes);
  used_bytes[device] += bytes;
  keep({{begin, begin + bytes}, Place::device, device, (char *)alias, true});
  *address = begin;
  return CUDA_SUCCESS;
}

int free_on_device(uintptr_t address) {
  Lock lock(order);
  Region *region = find_region(address);
  if (!region || region->bytes.begin != address || region->place != Place::device)
    return CUDA_ERROR_INVALID_VALUE;
  const Span bytes = region->bytes;
  const size_t size = bytes.end - bytes.begin;
  // The addresses stay taken, and the memory goes.
  for (const uintptr_t begin : {bytes.begin, uintptr_t(region->alias)})
    map((void *)begin, size, PROT_NONE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1);
  used_bytes[region->device] -= size;
  freed[bytes.end] = bytes;
  regions.erase(bytes.end);
  return CUDA_SUCCESS;
}

int allocate_pinned(uintptr_t *address, size_t size, int device) {
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  const size_t bytes = rounded_up(size, page_bytes);
  const int file = memory_file("pinned memory of the fake device", bytes);
  if (file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  void *host = map(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file);
  void *alias = map(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file);
  close(file);
  if (host == MAP_FAILED || alias == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto begin = uintptr_t(host);
  Lock lock(order);
  keep({{begin, begin + bytes}, Place::pinned, device, (char *)alias, true});
  *address = begin;
  return CUDA_SUCCESS;
}

int register_pinned(uintptr_t address, size_t size, int device) {
  if (!address || !size) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(order);
  const auto next = regions.upper_bound(address);
  if (next != regions.end() && next->second.bytes.begin < address + size)
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  Region region{{address, address + size}, Place::pinned, device};
  // Whole pages can be protected without a neighbour being hit. A mapping that is shared can be had
  // twice; a private one is reached by file; what is neither is open to the host all the time.
  const bool is_whole = address % page_bytes == 0 && size % page_bytes == 0;
  void *second = is_whole ? mremap((void *)address, 0, size, MREMAP_MAYMOVE) : MAP_FAILED;
  if (second != MAP_FAILED) region.alias = (char *)second;
  else if (!is_whole || process_memory() < 0) region.alias = (char *)address;
  keep(std::move(region));
  return CUDA_SUCCESS;
}

int release_pinned(uintptr_t address) {
  Lock lock(order);
  Region *region = find_region(address);
  if (!region || region->bytes.begin != address || region->place != Place::pinned)
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  region->accesses.clear();
  set_shield(*region);
  const size_t size = region->bytes.end - address;
  if (region->alias && region->alias != (char *)address) munmap(region->alias, size);
  if (region->is_ours) munmap((void *)address, size);
  regions.erase(region->bytes.end);
  return CUDA_SUCCESS;
}

char *alias_of(uintptr_t address) { return direct(address); }

void move_bytes(uintptr_t target, uintptr_t source, size_t size) {
  char *to = direct(target);
  const char *from = direct(source);
  if (to && from) {
    memcpy(to, from, size);
  } else if (to) {
    move_by_file(SYS_pread64, source, to, size);
  } else {
    std::vector<char> between;
    if (!from) {
      between.resize(size);
      move_by_file(SYS_pread64, source, between.data(), size);
      from = between.data();
    }
    move_by_file(SYS_pwrite64, target, (void *)from, size);
  }
}

void fill_bytes(uintptr_t target, unsigned char value, size_t size) {
  if (char *to = direct(target)) {
    memset(to, value, size);
  } else {
    std::vector<char> bytes(size, char(value));
    move_by_file(SYS_pwrite64, target, bytes.data(), size);
  }
}

}  // namespace fake
