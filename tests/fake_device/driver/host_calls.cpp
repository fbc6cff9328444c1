// System calls of the host on pinned memory: what reads and writes files takes part in the order of
// things. Preloaded, these take the place of the C library's functions of the same names. io_uring
// is not seen: on a page that is shielded it gets EFAULT.
#include <dlfcn.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "calls.h"
#include "lag.h"
#include "memory.h"

namespace {

// Whether any of the bytes is pinned: then the call is entered, and `end` has to follow.
bool begin(const char *name, const iovec *buffers, int count, bool writes) {
  bool is_pinned = false;
  fake::Lock lock(fake::order);
  for (int i = 0; i < count; i++) {
    const auto begin = uintptr_t(buffers[i].iov_base);
    is_pinned |= fake::begin_host_call(name, {begin, begin + buffers[i].iov_len}, writes);
  }
  return is_pinned;
}

void end(const iovec *buffers, int count) {
  fake::Lock lock(fake::order);
  for (int i = 0; i < count; i++) fake::end_host_call(uintptr_t(buffers[i].iov_base));
}

// `writes` says what becomes of the buffers: a call that reads a file writes to them.
template <class Call>
ssize_t watched(const char *name, const iovec *buffers, int count, bool writes, Call real) {
  const bool is_watched = fake::has_memory && !fake::is_forked_child();
  if (!is_watched || !begin(name, buffers, count, writes)) return real();
  fake::count_call(name);
  fake::wait_for_turn(fake::kind::disk, fake::no_stream);
  const ssize_t answer = real();
  end(buffers, count);
  return answer;
}

}  // namespace

// A function of the C library that moves bytes between one buffer, or several, and a file.
#define WATCH_ONE(name, type, writes, parameters, arguments)                            \
  ssize_t name parameters {                                                             \
    static const auto real = (decltype(&name))dlsym(RTLD_NEXT, #name);                  \
    const iovec one{const_cast<void *>((type)buffer), size};                            \
    return watched(#name, &one, 1, writes, [&] { return real arguments; });             \
  }
#define WATCH_SEVERAL(name, writes, parameters, arguments)                              \
  ssize_t name parameters {                                                             \
    static const auto real = (decltype(&name))dlsym(RTLD_NEXT, #name);                  \
    return watched(#name, buffers, count, writes, [&] { return real arguments; });      \
  }

extern "C" {

WATCH_ONE(read, void *, true, (int file, void *buffer, size_t size), (file, buffer, size))
WATCH_ONE(pread, void *, true, (int file, void *buffer, size_t size, off_t at),
          (file, buffer, size, at))
WATCH_ONE(pread64, void *, true, (int file, void *buffer, size_t size, off64_t at),
          (file, buffer, size, at))
WATCH_ONE(write, const void *, false, (int file, const void *buffer, size_t size),
          (file, buffer, size))
WATCH_ONE(pwrite, const void *, false, (int file, const void *buffer, size_t size, off_t at),
          (file, buffer, size, at))
WATCH_ONE(pwrite64, const void *, false, (int file, const void *buffer, size_t size, off64_t at),
          (file, buffer, size, at))

WATCH_SEVERAL(readv, true, (int file, const iovec *buffers, int count), (file, buffers, count))
WATCH_SEVERAL(preadv, true, (int file, const iovec *buffers, int count, off_t at),
              (file, buffers, count, at))
WATCH_SEVERAL(preadv64, true, (int file, const iovec *buffers, int count, off64_t at),
              (file, buffers, count, at))
WATCH_SEVERAL(preadv2, true, (int file, const iovec *buffers, int count, off_t at, int flags),
              (file, buffers, count, at, flags))
WATCH_SEVERAL(preadv64v2, true, (int file, const iovec *buffers, int count, off64_t at, int flags),
              (file, buffers, count, at, flags))
WATCH_SEVERAL(writev, false, (int file, const iovec *buffers, int count), (file, buffers, count))
WATCH_SEVERAL(pwritev, false, (int file, const iovec *buffers, int count, off_t at),
              (file, buffers, count, at))
WATCH_SEVERAL(pwritev64, false, (int file, const iovec *buffers, int count, off64_t at),
              (file, buffers, count, at))
WATCH_SEVERAL(pwritev2, false, (int file, const iovec *buffers, int count, off_t at, int flags),
              (file, buffers, count, at, flags))
WATCH_SEVERAL(pwritev64v2, false,
              (int file, const iovec *buffers, int count, off64_t at, int flags),
              (file, buffers, count, at, flags))
}
