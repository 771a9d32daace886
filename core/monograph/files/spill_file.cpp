#define XXH_INLINE_ALL
#include "monograph/files/spill_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <utility>

#include "monograph/files/list_folder.h"

namespace monograph::files {
namespace {

constexpr char kBegin[] = "monograph-spill-", kEnd[] = ".bin";
// Extents are whole pages, so that one can be given back to the system.
constexpr std::uint64_t kPageBytes = 4096;
// Linux transfers at most 2^31 - 4096 bytes in one call.
constexpr std::size_t kLongestCallBytes = std::size_t{1} << 30;
constexpr int kCreateAttempts = 64;

std::uint64_t whole_pages(std::uint64_t size_bytes) {
  return (size_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

std::array<std::uint64_t, 2> checksum_of(std::span<const std::uint8_t> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.low64, hash.high64};
}

bool is_unsupported(int code) {
  return code == EOPNOTSUPP || code == ENOSYS || code == EINVAL || code == ENOTSUP;
}

bool lock(FileOps& ops, int fd) {
  while (ops.flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EINTR) return false;
  }
  return true;
}

}  // namespace

SpillFile::SpillFile(const std::filesystem::path& folder, FileOps& ops)
    : ops_(ops), owner_(::getpid()) {
  remove_leftovers(folder);
  // Two containers may share a folder and have the same process numbers.
  static std::atomic<unsigned> number = 0;
  for (int attempt = 0; attempt < kCreateAttempts; ++attempt) {
    const std::string name = kBegin + std::to_string(owner_) + "-" + std::to_string(number++);
    if (create(folder / (name + kEnd))) return;
  }
  throw IoError(folder, "cannot make a spill file: every name was taken", EEXIST);
}

// False if the name is taken, or was taken away by another process before it was locked.
bool SpillFile::create(const std::filesystem::path& candidate) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
  fd_ = ops_.open(candidate.c_str(), kFlags, 0600);
  if (fd_ < 0) {
    if (errno == EEXIST) return false;
    throw IoError(candidate, "cannot be created", errno);
  }
  const bool locked = lock(ops_, fd_);
  const int why = locked ? 0 : errno;
  // On a file system without locks, ENOLCK among its answers, the file is used as it is.
  const bool usable = locked || is_unsupported(why) || why == ENOLCK;
  if (usable && has_the_name(ops_, fd_, candidate)) {
    path_ = candidate;
    named_ = true;
    return true;
  }
  // Who holds the lock of a new file takes it for a leftover, and removes it.
  const bool taken = usable || why == EWOULDBLOCK;
  if (!taken && has_the_name(ops_, fd_, candidate)) ops_.unlink(candidate.c_str());
  ops_.close(std::exchange(fd_, -1));
  if (!taken) throw IoError(candidate, "cannot be locked", why);
  return false;
}

// Those whose process is gone. Without locks on this file system nobody can tell, so all stay.
void SpillFile::remove_leftovers(const std::filesystem::path& folder) const {
  for (const std::string& name : list_folder(folder)) {
    if (!name.starts_with(kBegin) || !name.ends_with(kEnd)) continue;
    const std::filesystem::path path = folder / name;
    const int fd = ops_.open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
    if (fd < 0) continue;  // gone in the meantime, or somebody else's
    struct stat status {};
    if (lock(ops_, fd) && ops_.fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
        has_the_name(ops_, fd, path))
      ops_.unlink(path.c_str());
    ops_.close(fd);
  }
}

SpillFile::~SpillFile() {
  remove_name();
  if (fd_ >= 0) ops_.close(fd_);
}

void SpillFile::remove_name() noexcept {
  if (named_ && ::getpid() == owner_) ops_.unlink(path_.c_str());
  named_ = false;
}

void SpillFile::check_owner() const {
  const int found = ::getpid();
  if (found != owner_)
    throw Error(path_.string() + ": belongs to process " + std::to_string(owner_) +
                ", of which process " + std::to_string(found) + " is a copy; it may not write");
}

std::uint64_t SpillFile::take(std::uint64_t size_bytes) {
  const std::scoped_lock lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < size_bytes) continue;
    const auto [offset, size] = *it;
    free_.erase(it);
    if (size > size_bytes) free_.emplace(offset + size_bytes, size - size_bytes);
    return offset;
  }
  const std::uint64_t offset = end_;
  end_ += size_bytes;
  return offset;
}

void SpillFile::give_back(std::uint64_t offset_bytes, std::uint64_t size_bytes) noexcept {
  const std::scoped_lock lock(mutex_);
  try {
    auto [it, fresh] = free_.emplace(offset_bytes, size_bytes);
    if (it != free_.begin()) {
      const auto before = std::prev(it);
      if (before->first + before->second == it->first) {
        before->second += it->second;
        free_.erase(it);
        it = before;
      }
    }
    const auto after = std::next(it);
    if (after != free_.end() && it->first + it->second == after->first) {
      it->second += after->second;
      free_.erase(after);
    }
    if (it->first + it->second == end_) {
      end_ = it->first;
      free_.erase(it);
    }
  } catch (...) {
    return;  // without memory for the note the space is lost until the file is removed
  }
}

SpillFile::Extent SpillFile::write(std::span<const std::uint8_t> bytes) {
  check_owner();
  Extent extent = {0, bytes.size(), checksum_of(bytes)};
  if (bytes.empty()) return extent;
  const std::uint64_t pages = whole_pages(bytes.size());
  extent.offset_bytes = take(pages);
  const auto fail = [&](const std::string& what, int code) {
    release(extent);
    throw IoError(path_, what, code);
  };
  while (ops_.reserve(fd_, extent.offset_bytes, pages) != 0) {
    if (errno == EINTR) continue;
    if (is_unsupported(errno)) break;
    fail("cannot reserve " + std::to_string(pages) + " bytes", errno);
  }
  std::uint64_t done = 0;
  while (done < bytes.size()) {
    const std::size_t size = std::min<std::size_t>(bytes.size() - done, kLongestCallBytes);
    const ssize_t written = ops_.pwrite(fd_, bytes.data() + done, size, extent.offset_bytes + done);
    if (written < 0 && errno == EINTR) continue;
    // A write of nothing makes no progress and sets no errno.
    if (written <= 0)
      fail("cannot write " + std::to_string(bytes.size()) + " bytes",
           written == 0 ? ENOSPC : errno);
    done += static_cast<std::uint64_t>(written);
  }
  // The disk begins now, so that the pages can be dropped when memory is short.
  ops_.begin_writing(fd_, extent.offset_bytes, pages);
  return extent;
}

void SpillFile::read(const Extent& extent, std::span<std::uint8_t> into) const {
  if (into.size() != extent.size_bytes)
    throw Error(path_.string() + ": " + std::to_string(into.size()) +
                " bytes wanted of an extent of " + std::to_string(extent.size_bytes));
  const std::string where =
      std::to_string(extent.size_bytes) + " bytes at " + std::to_string(extent.offset_bytes);
  std::uint64_t done = 0;
  while (done < into.size()) {
    const std::size_t size = std::min<std::size_t>(into.size() - done, kLongestCallBytes);
    const ssize_t got = ops_.pread(fd_, into.data() + done, size, extent.offset_bytes + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw IoError(path_, "cannot read " + where, errno);
    if (got == 0)
      throw Error(path_.string() + ": ends after " + std::to_string(done) + " of " + where +
                  ": somebody cut it off");
    done += static_cast<std::uint64_t>(got);
  }
  if (checksum_of(into) != extent.checksum)
    throw Error(path_.string() + ": the checksum of " + where +
                " is not that of what was written: the file was changed or the disk is bad");
}

bool SpillFile::is(const Extent& extent, std::span<const std::uint8_t> bytes) {
  return bytes.size() == extent.size_bytes && checksum_of(bytes) == extent.checksum;
}

void SpillFile::will_read(const Extent& extent) const {
  ops_.begin_reading(fd_, extent.offset_bytes, extent.size_bytes);
}

void SpillFile::release(const Extent& extent) noexcept {
  if (extent.size_bytes == 0 || ::getpid() != owner_) return;
  const std::uint64_t pages = whole_pages(extent.size_bytes);
  // Pages that were not written yet need not be.
  ops_.punch_hole(fd_, extent.offset_bytes, pages);
  give_back(extent.offset_bytes, pages);
}

}  // namespace monograph::files
