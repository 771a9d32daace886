// A preloaded library: the k-th call of one function fails, in the whole program. For tests of the
// command line; those of the library inject faults through FileOps.
//   FAIL_CALL   write, pwrite, fsync, rename, renameat2, open, create, mkdir, fallocate, ftruncate,
//               mmap, unlink, malloc, aligned_alloc or pthread_create. write is any way to write at
//               the place of a descriptor; create is an open for writing; malloc is calloc and
//               realloc too.
//   FAIL_AT     which call fails, from 0; none if it is not set
//   FAIL_LAST   the last call that fails; that of FAIL_AT if it is not set
//   FAIL_ERRNO  the error, as a number
//   FAIL_SHORT  if it is set, write and pwrite do not fail, but transfer half of their bytes
//   FAIL_UNDER  a folder: calls on files elsewhere neither fail nor count
//   FAIL_COUNT  a file that gets the number of calls at the end
// A program that has loaded it may set them anew by fail_call.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
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
char under[4096] = "";
bool ready = false, shortens = false;

__attribute__((constructor)) void read_environment() {
  if (const char* name = std::getenv("FAIL_CALL")) std::strncpy(failing, name, sizeof failing - 1);
  if (const char* at = std::getenv("FAIL_AT")) fail_last = fail_at = std::atol(at);
  if (const char* last = std::getenv("FAIL_LAST")) fail_last = std::atol(last);
  if (const char* code = std::getenv("FAIL_ERRNO")) fail_errno = std::atoi(code);
  if (const char* folder = std::getenv("FAIL_UNDER")) std::strncpy(under, folder, sizeof under - 1);
  shortens = std::getenv("FAIL_SHORT") != nullptr;
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

bool is_meant(const char* name) { return ready && std::strcmp(name, failing) == 0; }

bool lies_under(const char* path) { return std::strncmp(path, under, std::strlen(under)) == 0; }

bool fails(const char* name) {
  if (!is_meant(name)) return false;
  const long call = calls++;
  if (fail_at < 0 || call < fail_at || call > fail_last) return false;
  errno = fail_errno;
  return true;
}

bool fails_on(const char* name, const char* path) {
  return is_meant(name) && (under[0] == 0 || lies_under(path)) && fails(name);
}

// By the path that the descriptor was opened with.
bool fails_on(const char* name, int fd) {
  if (!is_meant(name)) return false;
  char link[64], path[4096] = "";
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t size = ::readlink(link, path, sizeof path - 1);
  path[size < 0 ? 0 : size] = 0;
  return fails_on(name, path);
}

// What a short write transfers: more than nothing.
std::size_t part_of(std::size_t size) { return size - size / 2; }

bool is_for_writing(int flags) { return (flags & (O_CREAT | O_WRONLY | O_RDWR)) != 0; }

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

// The error of calls that fail from now on, as FAIL_ERRNO; 0: they are short, as FAIL_SHORT says.
__attribute__((visibility("default"))) void fail_with(int code) {
  shortens = code == 0;
  fail_errno = code;
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
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* memory, std::size_t size);

__attribute__((visibility("default"))) void* malloc(std::size_t size) {
  if (fails("malloc")) {
    errno = ENOMEM;
    return nullptr;
  }
  return __libc_malloc(size);
}

__attribute__((visibility("default"))) void* calloc(std::size_t count, std::size_t size) {
  if (fails("malloc")) {
    errno = ENOMEM;
    return nullptr;
  }
  return __libc_calloc(count, size);
}

__attribute__((visibility("default"))) void* realloc(void* memory, std::size_t size) {
  if (fails("malloc")) {
    errno = ENOMEM;
    return nullptr;
  }
  return __libc_realloc(memory, size);
}

__attribute__((visibility("default"))) ssize_t write(int fd, const void* data, std::size_t size) {
  static auto* real = next<ssize_t(int, const void*, std::size_t)>("write");
  if (!fails_on("write", fd)) return real(fd, data, size);
  return shortens ? real(fd, data, part_of(size)) : -1;
}

__attribute__((visibility("default"))) ssize_t writev(int fd, const struct iovec* parts,
                                                      int count) {
  static auto* real = next<ssize_t(int, const struct iovec*, int)>("writev");
  if (!fails_on("write", fd)) return real(fd, parts, count);
  return shortens && count > 0 ? ::write(fd, parts[0].iov_base, part_of(parts[0].iov_len)) : -1;
}

__attribute__((visibility("default"))) ssize_t sendfile(int to, int from, off_t* offset,
                                                        std::size_t size) {
  static auto* real = next<ssize_t(int, int, off_t*, std::size_t)>("sendfile");
  if (!fails_on("write", to)) return real(to, from, offset, size);
  return shortens ? real(to, from, offset, part_of(size)) : -1;
}

__attribute__((visibility("default"))) ssize_t copy_file_range(int from, off64_t* from_offset,
                                                               int to, off64_t* to_offset,
                                                               std::size_t size, unsigned flags) {
  static auto* real =
      next<ssize_t(int, off64_t*, int, off64_t*, std::size_t, unsigned)>("copy_file_range");
  if (!fails_on("write", to)) return real(from, from_offset, to, to_offset, size, flags);
  return shortens ? real(from, from_offset, to, to_offset, part_of(size), flags) : -1;
}

__attribute__((visibility("default"))) ssize_t pwrite(int fd, const void* data, std::size_t size,
                                                      off_t offset) {
  static auto* real = next<ssize_t(int, const void*, std::size_t, off_t)>("pwrite");
  if (!fails_on("pwrite", fd)) return real(fd, data, size, offset);
  return shortens ? real(fd, data, part_of(size), offset) : -1;
}

__attribute__((visibility("default"))) ssize_t pwrite64(int fd, const void* data, std::size_t size,
                                                        off_t offset) {
  return ::pwrite(fd, data, size, offset);
}

__attribute__((visibility("default"))) int fsync(int fd) {
  static auto* real = next<int(int)>("fsync");
  return fails_on("fsync", fd) ? -1 : real(fd);
}

__attribute__((visibility("default"))) int ftruncate(int fd, off_t size) {
  static auto* real = next<int(int, off_t)>("ftruncate");
  return fails_on("ftruncate", fd) ? -1 : real(fd, size);
}

__attribute__((visibility("default"))) int ftruncate64(int fd, off_t size) {
  return ::ftruncate(fd, size);
}

__attribute__((visibility("default"))) int fallocate(int fd, int mode, off_t offset, off_t size) {
  static auto* real = next<int(int, int, off_t, off_t)>("fallocate");
  return fails_on("fallocate", fd) ? -1 : real(fd, mode, offset, size);
}

__attribute__((visibility("default"))) void* mmap(void* place, std::size_t size, int protection,
                                                  int flags, int fd, off_t offset) {
  static auto* real = next<void*(void*, std::size_t, int, int, int, off_t)>("mmap");
  const bool failed = fd >= 0 ? fails_on("mmap", fd) : under[0] == 0 && fails("mmap");
  return failed ? MAP_FAILED : real(place, size, protection, flags, fd, offset);
}

__attribute__((visibility("default"))) void* mmap64(void* place, std::size_t size, int protection,
                                                    int flags, int fd, off_t offset) {
  return ::mmap(place, size, protection, flags, fd, offset);
}

__attribute__((visibility("default"))) int rename(const char* from, const char* to) {
  static auto* real = next<int(const char*, const char*)>("rename");
  return fails_on("rename", to) ? -1 : real(from, to);
}

__attribute__((visibility("default"))) int renameat2(int from_fd, const char* from, int to_fd,
                                                     const char* to, unsigned flags) {
  static auto* real = next<int(int, const char*, int, const char*, unsigned)>("renameat2");
  return fails_on("renameat2", to) ? -1 : real(from_fd, from, to_fd, to, flags);
}

__attribute__((visibility("default"))) int unlink(const char* path) {
  static auto* real = next<int(const char*)>("unlink");
  return fails_on("unlink", path) ? -1 : real(path);
}

__attribute__((visibility("default"))) int mkdir(const char* path, mode_t mode) {
  static auto* real = next<int(const char*, mode_t)>("mkdir");
  return fails_on("mkdir", path) ? -1 : real(path, mode);
}

__attribute__((visibility("default"))) int openat(int folder, const char* path, int flags, ...) {
  static auto* real = next<int(int, const char*, int, ...)>("openat");
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  const bool failed = fails_on("open", path) || (is_for_writing(flags) && fails_on("create", path));
  return failed ? -1 : real(folder, path, flags, mode);
}

__attribute__((visibility("default"))) int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return ::openat(AT_FDCWD, path, flags, mode);
}

__attribute__((visibility("default"))) int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return ::openat(AT_FDCWD, path, flags, mode);
}

}  // extern "C"
