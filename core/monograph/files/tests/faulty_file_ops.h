// File operations that fail on demand, and a disk that forgets what was never synced.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "monograph/files/file_ops.h"

namespace monograph::files {

enum class Call {
  kOpen,
  kClose,
  kStat,
  kFstat,
  kFchmod,
  kFlock,
  kFallocate,
  kPwrite,
  kPread,
  kReserve,
  kFsync,
  kRename,
  kUnlink,
  kMkdir,
  kRmdir,
  kExchange,
  kCount
};

// One name per kind: a kind without one does not compile.
inline const char* name_of(Call call) {
  constexpr auto kNames = std::to_array<const char*>(
      {"open", "close", "stat", "fstat", "fchmod", "flock", "fallocate", "pwrite", "pread",
       "reserve", "fsync", "rename", "unlink", "mkdir", "rmdir", "exchange"});
  static_assert(kNames.size() == static_cast<std::size_t>(Call::kCount));
  return kNames.at(static_cast<std::size_t>(call));
}

// Counts calls, from any thread; the `at`-th call of `kind` (from 0) fails with `code` and has no
// effect.
class FaultyFileOps : public FileOps {
 public:
  void fail(Call kind, int at, int code) {
    kind_ = kind;
    at_ = at;
    code_ = code;
    for (std::atomic<int>& count : counts_) count = 0;
  }
  int count(Call kind) const { return counts_[static_cast<std::size_t>(kind)]; }
  // At most so many bytes in one write, as the system may do.
  void shorten_writes(std::size_t size_bytes) { longest_write_ = size_bytes; }
  void shorten_reads(std::size_t size_bytes) { longest_read_ = size_bytes; }

  int open(const char* path, int flags, mode_t mode) override {
    return fails(Call::kOpen) ? -1 : FileOps::open(path, flags, mode);
  }
  int close(int fd) override {
    // Linux frees the descriptor even if close reports an error.
    const bool failed = fails(Call::kClose);
    const int code = errno;
    const int result = FileOps::close(fd);
    if (failed) errno = code;
    return failed ? -1 : result;
  }
  int stat(const char* path, struct stat* status) override {
    return fails(Call::kStat) ? -1 : FileOps::stat(path, status);
  }
  int fstat(int fd, struct stat* status) override {
    return fails(Call::kFstat) ? -1 : FileOps::fstat(fd, status);
  }
  int fchmod(int fd, mode_t mode) override {
    return fails(Call::kFchmod) ? -1 : FileOps::fchmod(fd, mode);
  }
  int flock(int fd, int operation) override {
    return fails(Call::kFlock) ? -1 : FileOps::flock(fd, operation);
  }
  int fallocate(int fd, std::uint64_t size_bytes) override {
    return fails(Call::kFallocate) ? -1 : FileOps::fallocate(fd, size_bytes);
  }
  ssize_t pwrite(int fd, const void* data, std::size_t size, std::uint64_t offset) override {
    return fails(Call::kPwrite) ? -1
                                : FileOps::pwrite(fd, data, std::min(size, longest_write_), offset);
  }
  ssize_t pread(int fd, void* data, std::size_t size, std::uint64_t offset) override {
    return fails(Call::kPread) ? -1
                               : FileOps::pread(fd, data, std::min(size, longest_read_), offset);
  }
  int reserve(int fd, std::uint64_t offset, std::uint64_t size) override {
    return fails(Call::kReserve) ? -1 : FileOps::reserve(fd, offset, size);
  }
  // Without the disk: no test here outlives the machine, and thousands of real syncs take minutes.
  int fsync(int /*fd*/) override { return fails(Call::kFsync) ? -1 : 0; }
  int rename(const char* from, const char* to) override {
    return fails(Call::kRename) ? -1 : FileOps::rename(from, to);
  }
  int unlink(const char* path) override {
    return fails(Call::kUnlink) ? -1 : FileOps::unlink(path);
  }
  int mkdir(const char* path, mode_t mode) override {
    return fails(Call::kMkdir) ? -1 : FileOps::mkdir(path, mode);
  }
  int rmdir(const char* path) override { return fails(Call::kRmdir) ? -1 : FileOps::rmdir(path); }
  int exchange(const char* one, const char* other) override {
    return fails(Call::kExchange) ? -1 : FileOps::exchange(one, other);
  }

 private:
  bool fails(Call kind) {
    const int number = counts_[static_cast<std::size_t>(kind)]++;
    if (kind != kind_ || number != at_) return false;
    errno = code_;
    return true;
  }

  Call kind_ = Call::kCount;
  int at_ = 0, code_ = 0;
  std::size_t longest_write_ = SIZE_MAX, longest_read_ = SIZE_MAX;
  std::array<std::atomic<int>, static_cast<std::size_t>(Call::kCount)> counts_{};
};

// The power fails before the `power_calls`-th call that changes anything; from then on every call
// fails and nothing happens. Written bytes reach the file only with fsync of that file: until then
// it holds zeros of the reserved length. kEager renames at once, the order that is worst if data is
// not synced first; kLazy renames only with fsync of a folder, the worst if that is forgotten.
enum class Renames { kEager, kLazy };

class PowerFailureOps : public FileOps {
 public:
  PowerFailureOps(int power_calls, Renames renames)
      : power_calls_(power_calls), renames_(renames) {}
  bool failed() const { return power_calls_ < 0; }

  int open(const char* path, int flags, mode_t mode) override {
    if ((flags & O_CREAT) != 0 && !power()) return -1;
    if (failed()) return off();
    return FileOps::open(path, flags, mode);
  }
  int fchmod(int fd, mode_t mode) override { return power() ? FileOps::fchmod(fd, mode) : -1; }
  int fallocate(int fd, std::uint64_t size_bytes) override {
    return power() ? FileOps::fallocate(fd, size_bytes) : -1;
  }
  ssize_t pwrite(int fd, const void* data, std::size_t size, std::uint64_t offset) override {
    if (!power()) return -1;
    const auto* bytes = static_cast<const char*>(data);
    unsynced_[fd].emplace_back(offset, std::string(bytes, size));
    return static_cast<ssize_t>(size);
  }
  int fsync(int fd) override {
    if (!power()) return -1;
    for (const auto& [offset, bytes] : unsynced_[fd]) {
      FileOps::pwrite(fd, bytes.data(), bytes.size(), offset);
    }
    unsynced_.erase(fd);
    struct stat status {};
    FileOps::fstat(fd, &status);
    if (S_ISDIR(status.st_mode)) {
      for (const auto& [from, to] : pending_) FileOps::rename(from.c_str(), to.c_str());
      pending_.clear();
    }
    return 0;
  }
  int rename(const char* from, const char* to) override {
    if (!power()) return -1;
    if (renames_ == Renames::kEager) return FileOps::rename(from, to);
    pending_.emplace_back(from, to);
    return 0;
  }
  int unlink(const char* path) override { return power() ? FileOps::unlink(path) : -1; }
  int mkdir(const char* path, mode_t mode) override {
    return power() ? FileOps::mkdir(path, mode) : -1;
  }
  int rmdir(const char* path) override { return power() ? FileOps::rmdir(path) : -1; }
  int exchange(const char* one, const char* other) override {
    return power() ? FileOps::exchange(one, other) : -1;
  }

 private:
  int off() {
    errno = EIO;
    return -1;
  }
  bool power() {
    if (power_calls_ < 0 || power_calls_-- == 0) {
      power_calls_ = -1;
      off();
      return false;
    }
    return true;
  }

  int power_calls_;
  Renames renames_;
  std::map<int, std::vector<std::pair<std::uint64_t, std::string>>> unsynced_;
  std::vector<std::pair<std::string, std::string>> pending_;
};

}  // namespace monograph::files
