// A preloaded library: the k-th call of one function fails, in the whole program. For tests of the
// command line; those of the library inject faults through FileOps.
//   FAIL_CALL   pwrite, fsync, rename, renameat2, open, mkdir, fallocate, malloc, aligned_alloc or
//               pthread_create
//   FAIL_AT     which call fails, from 0; none if it is not set
//   FAIL_LAST   the last call that fails; that of FAIL_AT if it is not set
//   FAIL_ERRNO  the error, as a number
//   FAIL_COUNT  a file that gets the number of calls at the end
// A program that has loaded it may set them anew by fail_call.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<long> calls = 0;
char failing[32] = "";
std::atomic<long> fail_at = -1, fail_last = -1;
int fail_errno = EIO;
bool ready = false;

__attribute__((constructor)) void read_environment() {
  if (const char* name = std::getenv("FAIL_CALL")) std::strncpy(failing, name, sizeof failing - 1);
  if (const char* at = std::getenv("FAIL_AT")) fail_last = fail_at = std::atol(at);
  if (const char* last = std::getenv("FAIL_LAST")) fail_last = std::atol(last);
  if (const char* code = std::getenv("FAIL_ERRNO")) fail_errno = std::atoi(code);
  ready = true;
}

__attribute__((destructor)) void write_count() {
  const long count = calls;
  ready = false;
  if (const char* path = std::getenv("FAIL_COUNT")) {
    if (std::FILE* file = std::fopen(path, "w")) {
      std::fprintf(file, "%ld\n", count);
      std::fclose(file);
    }
  }
}

bool fails(const char* name) {
  if (!ready || std::strcmp(name, failing) != 0) return false;
  const long call = calls++;
  if (fail_at < 0 || call < fail_at || call > fail_last) return false;
  errno = fail_errno;
  return true;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

// From now on: the calls of `name` number `at` to `last`, from 0, fail. Returns how many there were
// since the last call of this function.
__attribute__((visibility("default"))) long fail_call(const char* name, long at, long last) {
  fail_at = -1;
  std::strncpy(failing, name, sizeof failing - 1);
  const long before = calls.exchange(0);
  fail_last = last;
  fail_at = at;
  return before;
}

__attribute__((visibility("default"))) void* aligned_alloc(std::size_t unit, std::size_t size) {
  static auto* real = next<void*(std::size_t, std::size_t)>("aligned_alloc");
  return fails("aligned_alloc") ? nullptr : real(unit, size);
}

__attribute__((visibility("default"))) int pthread_create(pthread_t* thread,
                                                          const pthread_attr_t* attributes,
                                                          void* (*start)(void*), void* argument) {
  static auto* real =
      next<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
  return fails("pthread_create") ? fail_errno : real(thread, attributes, start, argument);
}

void* __libc_malloc(std::size_t size);

__attribute__((visibility("default"))) void* malloc(std::size_t size) {
  if (fails("malloc")) {
    errno = ENOMEM;
    return nullptr;
  }
  return __libc_malloc(size);
}

__attribute__((visibility("default"))) ssize_t pwrite(int fd, const void* data, std::size_t size,
                                                      off_t offset) {
  static auto* real = next<ssize_t(int, const void*, std::size_t, off_t)>("pwrite");
  return fails("pwrite") ? -1 : real(fd, data, size, offset);
}

__attribute__((visibility("default"))) int fsync(int fd) {
  static auto* real = next<int(int)>("fsync");
  return fails("fsync") ? -1 : real(fd);
}

__attribute__((visibility("default"))) int fallocate(int fd, int mode, off_t offset, off_t size) {
  static auto* real = next<int(int, int, off_t, off_t)>("fallocate");
  return fails("fallocate") ? -1 : real(fd, mode, offset, size);
}

__attribute__((visibility("default"))) int rename(const char* from, const char* to) {
  static auto* real = next<int(const char*, const char*)>("rename");
  return fails("rename") ? -1 : real(from, to);
}

__attribute__((visibility("default"))) int renameat2(int from_fd, const char* from, int to_fd,
                                                     const char* to, unsigned flags) {
  static auto* real = next<int(int, const char*, int, const char*, unsigned)>("renameat2");
  return fails("renameat2") ? -1 : real(from_fd, from, to_fd, to, flags);
}

__attribute__((visibility("default"))) int mkdir(const char* path, mode_t mode) {
  static auto* real = next<int(const char*, mode_t)>("mkdir");
  return fails("mkdir") ? -1 : real(path, mode);
}

__attribute__((visibility("default"))) int open(const char* path, int flags, ...) {
  static auto* real = next<int(const char*, int, ...)>("open");
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return fails("open") ? -1 : real(path, flags, mode);
}

}  // extern "C"
