// What programs compiled with the headers of glibc 2.36 need and glibc 2.28 has not: linked into
// them by the scripts that link_stubs.py writes, hidden from others. x86-64.
#include <stddef.h>
#include <sys/random.h>

// <sys/stat.h> is left out: it declares these with types that would have to be repeated. 1: the
// layout of struct stat.
enum { kStatLayout = 1 };
int __xstat(int layout, const char* path, void* found);
int __lxstat(int layout, const char* path, void* found);
int __fxstat(int layout, int file, void* found);
int __fxstatat(int layout, int folder, const char* path, void* found, int flags);

int stat(const char* path, void* found) { return __xstat(kStatLayout, path, found); }
int lstat(const char* path, void* found) { return __lxstat(kStatLayout, path, found); }
int fstat(int file, void* found) { return __fxstat(kStatLayout, file, found); }
int fstatat(int folder, const char* path, void* found, int flags) {
  return __fxstatat(kStatLayout, folder, path, found, flags);
}

// Of 64 bits: the same on this processor.
int stat64(const char* path, void* found) { return __xstat(kStatLayout, path, found); }
int lstat64(const char* path, void* found) { return __lxstat(kStatLayout, path, found); }
int fstat64(int file, void* found) { return __fxstat(kStatLayout, file, found); }

// Read by libstdc++ to leave out atomic operations; "perhaps not" is always right.
char __libc_single_threaded = 0;

// For std::random_device.
unsigned arc4random(void) {
  unsigned value = 0;
  while (getrandom(&value, sizeof value, 0) != (ssize_t)sizeof value) {
  }
  return value;
}
