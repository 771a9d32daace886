#include "monograph/files/file_ops.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdio>
#include <system_error>

namespace monograph::files {

IoError::IoError(const std::filesystem::path& path, const std::string& what, int code)
    : Error(path.string() + ": " + what + ": " + std::generic_category().message(code)),
      code_(code) {}

int FileOps::open(const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }
int FileOps::close(int fd) { return ::close(fd); }
int FileOps::stat(const char* path, struct stat* status) { return ::stat(path, status); }
int FileOps::fstat(int fd, struct stat* status) { return ::fstat(fd, status); }
int FileOps::fchmod(int fd, mode_t mode) { return ::fchmod(fd, mode); }
int FileOps::flock(int fd, int operation) { return ::flock(fd, operation); }
int FileOps::fallocate(int fd, std::uint64_t size_bytes) {
  return ::fallocate(fd, 0, 0, static_cast<off_t>(size_bytes));
}
ssize_t FileOps::pwrite(int fd, const void* data, std::size_t size_bytes,
                        std::uint64_t offset_bytes) {
  return ::pwrite(fd, data, size_bytes, static_cast<off_t>(offset_bytes));
}
ssize_t FileOps::pread(int fd, void* data, std::size_t size_bytes, std::uint64_t offset_bytes) {
  return ::pread(fd, data, size_bytes, static_cast<off_t>(offset_bytes));
}
int FileOps::reserve(int fd, std::uint64_t offset_bytes, std::uint64_t size_bytes) {
  return ::fallocate(fd, 0, static_cast<off_t>(offset_bytes), static_cast<off_t>(size_bytes));
}
int FileOps::punch_hole(int fd, std::uint64_t offset_bytes, std::uint64_t size_bytes) {
  return ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                     static_cast<off_t>(offset_bytes), static_cast<off_t>(size_bytes));
}
void FileOps::begin_writing(int fd, std::uint64_t offset_bytes, std::uint64_t size_bytes) {
  ::sync_file_range(fd, static_cast<off_t>(offset_bytes), static_cast<off_t>(size_bytes),
                    SYNC_FILE_RANGE_WRITE);
}
void FileOps::begin_reading(int fd, std::uint64_t offset_bytes, std::uint64_t size_bytes) {
  ::posix_fadvise(fd, static_cast<off_t>(offset_bytes), static_cast<off_t>(size_bytes),
                  POSIX_FADV_WILLNEED);
}
int FileOps::fsync(int fd) { return ::fsync(fd); }
int FileOps::rename(const char* from, const char* to) { return std::rename(from, to); }
int FileOps::unlink(const char* path) { return ::unlink(path); }
int FileOps::mkdir(const char* path, mode_t mode) { return ::mkdir(path, mode); }
int FileOps::rmdir(const char* path) { return ::rmdir(path); }
int FileOps::exchange(const char* one, const char* other) {
  return ::renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE);
}

FileOps& system_file_ops() {
  static FileOps ops;
  return ops;
}

bool has_the_name(FileOps& ops, int fd, const std::filesystem::path& name) {
  struct stat held {
  }, named{};
  return ops.fstat(fd, &held) == 0 && ops.stat(name.c_str(), &named) == 0 &&
         id_of(held) == id_of(named);
}

}  // namespace monograph::files
