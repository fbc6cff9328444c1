// What NVIDIA's own cuFile looks for on a machine and a container lacks: the list of the kernel's
// modules, without which it never returns, and what udev knows of drives, without which it takes no
// file. Preloaded, this shows it an empty list, and drives that have a file system.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

namespace {

constexpr char modules[] = "/proc/modules", drives[] = "/run/udev/data/b";

// What udev keeps of a drive with a file system, as a path that can be opened again and again.
const char *drive() {
  static const std::string path = [] {
    constexpr char kept[] = "I:1\nE:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\nE:ID_FS_UUID=1\n";
    const int file = memfd_create("what udev keeps of a drive", 0);
    const bool is_kept = write(file, kept, sizeof kept - 1) == ssize_t(sizeof kept - 1);
    return is_kept ? "/proc/self/fd/" + std::to_string(file) : "/dev/null";
  }();
  return path.c_str();
}

const char *shown(const char *path) {
  if (path && !strcmp(path, modules)) return "/dev/null";
  return path && !strncmp(path, drives, sizeof drives - 1) ? drive() : path;
}

template <class Function>
Function *next(const char *name) {
  return (Function *)dlsym(RTLD_NEXT, name);
}

}  // namespace

#define SHOW_STREAM(name)                                   \
  FILE *name(const char *path, const char *mode) {          \
    static const auto real = next<decltype(name)>(#name);   \
    return real(shown(path), mode);                         \
  }
// The mode is read whether or not it was given, as the C library does.
#define SHOW_FILE(name)                                     \
  int name(const char *path, int flags, ...) {              \
    static const auto real = next<decltype(name)>(#name);   \
    va_list more;                                           \
    va_start(more, flags);                                  \
    const mode_t mode = va_arg(more, mode_t);               \
    va_end(more);                                           \
    return real(shown(path), flags, mode);                  \
  }
#define SHOW_FILE_AT(name)                                  \
  int name(int folder, const char *path, int flags, ...) {  \
    static const auto real = next<decltype(name)>(#name);   \
    va_list more;                                           \
    va_start(more, flags);                                  \
    const mode_t mode = va_arg(more, mode_t);               \
    va_end(more);                                           \
    return real(folder, shown(path), flags, mode);          \
  }

extern "C" {
SHOW_STREAM(fopen)
SHOW_STREAM(fopen64)
SHOW_FILE(open)
SHOW_FILE(open64)
SHOW_FILE_AT(openat)
SHOW_FILE_AT(openat64)
}
