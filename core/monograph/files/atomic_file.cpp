#include "monograph/files/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace monograph::files {
namespace {

constexpr int kCreateFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
// Linux transfers at most 2^31 - 4096 bytes in one call.
constexpr std::size_t kLongestWriteBytes = std::size_t{1} << 30;
// Each round another process removed or made the temporary between two of our calls.
constexpr int kCreateAttempts = 8;

bool is_unsupported(int code) {
  return code == EOPNOTSUPP || code == ENOSYS || code == EINVAL || code == ENOTSUP;
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path target, std::span<const FileId> inputs, FileOps& ops)
    : ops_(ops), target_(std::move(target)) {
  if (target_.filename().empty()) throw Error(target_.string() + ": names a folder, not a file");
  resolve();
  const std::optional<mode_t> mode = check_target(inputs);
  try {
    open_temporary(mode.value_or(0666) & 0666);
    if (mode) set_mode(*mode);
  } catch (...) {
    discard();
    throw;
  }
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::discard() noexcept {
  // Unlinked before it is closed: while the lock is held nobody else can own the name.
  if (temporary_exists_) ops_.unlink(temporary_.c_str());
  temporary_exists_ = false;
  if (fd_ >= 0) ops_.close(fd_);
  fd_ = -1;
}

void AtomicFile::fail(const std::string& what, int code) const {
  throw IoError(target_, what, code);
}

void AtomicFile::resolve() {
  const std::filesystem::path given = target_.parent_path();
  std::error_code error;
  folder_ = std::filesystem::canonical(given.empty() ? "." : given, error);
  if (error) fail("its folder cannot be found", error.value());
  name_ = folder_ / target_.filename();
  temporary_ = folder_ / std::string(".").append(target_.filename().string()).append(".partial");
}

// The permissions of an existing target.
std::optional<mode_t> AtomicFile::check_target(std::span<const FileId> inputs) const {
  struct stat status {};
  if (ops_.stat(name_.c_str(), &status) != 0) {
    // ENOENT also for a symbolic link to nothing, which rename replaces.
    if (errno == ENOENT) return std::nullopt;
    fail("cannot look at the target", errno);
  }
  if (!S_ISREG(status.st_mode)) throw Error(target_.string() + ": is not a regular file");
  if (std::find(inputs.begin(), inputs.end(), id_of(status)) != inputs.end()) {
    throw Error(target_.string() + ": is one of the files it would be made from; write elsewhere");
  }
  return status.st_mode & 0777;
}

void AtomicFile::open_temporary(mode_t mode) {
  for (int attempt = 0; attempt < kCreateAttempts; ++attempt) {
    fd_ = ops_.open(temporary_.c_str(), kCreateFlags, mode);
    if (fd_ < 0) {
      if (errno != EEXIST) fail("cannot create " + temporary_.string(), errno);
      if (!remove_stale_temporary()) {
        fail("another process is writing it, or left " + temporary_.string(), EBUSY);
      }
      continue;
    }
    // Until it is locked another writer may take the new file for a stale one: it holds the lock,
    // or it has removed the name, and the lock is one on a file that nobody will ever see.
    if (ops_.flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      fail("another process is writing it", EBUSY);
    }
    temporary_exists_ = has_the_name(ops_, fd_, temporary_);
    if (temporary_exists_) return;
    ops_.close(std::exchange(fd_, -1));
  }
  fail("other processes are writing it, or " + temporary_.string() + " cannot be looked at", EBUSY);
}

// False if a living process holds it. Without locks on this file system nobody can tell, so it is
// left alone.
bool AtomicFile::remove_stale_temporary() {
  const int fd =
      ops_.open(temporary_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, /*mode=*/0);
  if (fd < 0) return errno == ENOENT;  // gone in the meantime
  const bool locked = ops_.flock(fd, LOCK_EX | LOCK_NB) == 0;
  const bool same = locked && has_the_name(ops_, fd, temporary_);
  const bool removed = same && ops_.unlink(temporary_.c_str()) == 0;
  ops_.close(fd);
  return removed || (locked && !same);
}

void AtomicFile::set_mode(mode_t mode) {
  struct stat status {};
  if (ops_.fstat(fd_, &status) != 0) fail("cannot look at the temporary", errno);
  // Not asked for nothing: some network file systems refuse chmod.
  if ((status.st_mode & 0777) == mode) return;
  if (ops_.fchmod(fd_, mode) != 0) fail("cannot keep the permissions", errno);
}

void AtomicFile::allocate(std::uint64_t size_bytes) {
  if (size_bytes == 0) return;
  while (ops_.fallocate(fd_, size_bytes) != 0) {
    if (errno == EINTR) continue;
    if (is_unsupported(errno)) return;
    fail("cannot reserve " + std::to_string(size_bytes) + " bytes", errno);
  }
}

void AtomicFile::write_at(std::uint64_t offset_bytes, std::span<const std::uint8_t> bytes) {
  while (!bytes.empty()) {
    const std::size_t size = std::min(bytes.size(), kLongestWriteBytes);
    const ssize_t written = ops_.pwrite(fd_, bytes.data(), size, offset_bytes);
    if (written < 0 && errno == EINTR) continue;
    // A write of nothing makes no progress and sets no errno.
    if (written <= 0) fail("cannot write", written == 0 ? ENOSPC : errno);
    offset_bytes += static_cast<std::uint64_t>(written);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::sync() {
  // Never tried again after a failure: Linux drops the pages and the second call succeeds.
  if (ops_.fsync(fd_) != 0) fail("cannot sync to disk", errno);
}

void AtomicFile::rename_into_place() {
  if (ops_.rename(temporary_.c_str(), name_.c_str()) != 0) {
    fail("cannot rename the temporary file", errno);
  }
  temporary_exists_ = false;
}

void AtomicFile::sync_folder() {
  const int fd = ops_.open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, /*mode=*/0);
  if (fd < 0) fail("is in place, but its folder cannot be opened", errno);
  const int code = ops_.fsync(fd) == 0 ? 0 : errno;
  ops_.close(fd);
  if (code != 0 && !is_unsupported(code)) {
    fail("is in place, but its folder cannot be synced to disk", code);
  }
}

void write_file(const std::filesystem::path& target, std::string_view content, FileOps& ops) {
  AtomicFile file(target, {}, ops);
  file.write_at(0, {reinterpret_cast<const std::uint8_t*>(content.data()), content.size()});
  file.sync();
  file.rename_into_place();
  file.sync_folder();
}

}  // namespace monograph::files
