// The system calls of what is written and read back, as a seam: tests fail the k-th call of a kind
// or drop what was never synced.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "monograph/base/error.h"

namespace monograph::files {

// The machine failed, not the file's content: disk full, no permission, no such file. The command
// line gives it exit code 5 where a plain Error gives 3.
class IoError : public Error {
 public:
  IoError(const std::filesystem::path& path, const std::string& what, int code);
  int code() const { return code_; }  // an errno value

 private:
  int code_;
};

// Which file a path leads to, whatever its name.
struct FileId {
  dev_t device = 0;
  ino_t inode = 0;
  friend bool operator==(const FileId&, const FileId&) = default;
};
inline FileId id_of(const struct stat& status) { return {status.st_dev, status.st_ino}; }

// Each function is the system call of that name and returns what it returns: -1 and errno on
// failure. The base class calls the system and has no state, so one object serves every thread.
class FileOps {
 public:
  virtual ~FileOps() = default;
  virtual int open(const char* path, int flags, mode_t mode);
  virtual int close(int fd);
  virtual int stat(const char* path, struct stat* status);
  virtual int fstat(int fd, struct stat* status);
  virtual int fchmod(int fd, mode_t mode);
  virtual int flock(int fd, int operation);
  // fallocate(2) from 0, not posix_fallocate: that one writes every page where the file system
  // cannot allocate.
  virtual int fallocate(int fd, std::uint64_t size_bytes);
  virtual ssize_t pwrite(int fd, const void* data, std::size_t size_bytes,
                         std::uint64_t offset_bytes);
  virtual ssize_t pread(int fd, void* data, std::size_t size_bytes, std::uint64_t offset_bytes);
  // fallocate(2) of a range, and with FALLOC_FL_PUNCH_HOLE.
  virtual int reserve(int fd, std::uint64_t offset_bytes, std::uint64_t size_bytes);
  virtual int punch_hole(int fd, std::uint64_t offset_bytes, std::uint64_t size_bytes);
  // sync_file_range(2) with SYNC_FILE_RANGE_WRITE, posix_fadvise(2) with POSIX_FADV_WILLNEED: they
  // do not wait, and what they return is of no use.
  virtual void begin_writing(int fd, std::uint64_t offset_bytes, std::uint64_t size_bytes);
  virtual void begin_reading(int fd, std::uint64_t offset_bytes, std::uint64_t size_bytes);
  virtual int fsync(int fd);
  virtual int rename(const char* from, const char* to);
  virtual int unlink(const char* path);
  virtual int mkdir(const char* path, mode_t mode);
  virtual int rmdir(const char* path);
  // renameat2(2) with RENAME_EXCHANGE: each of the two takes the other's name, in one step.
  virtual int exchange(const char* one, const char* other);
};

FileOps& system_file_ops();

// Whether the open file still is the one of this name: a lock on an inode that no longer has the
// name proves nothing about the one that has it now.
bool has_the_name(FileOps& ops, int fd, const std::filesystem::path& name);

}  // namespace monograph::files
