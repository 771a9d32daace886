#include "monograph/files/staged_folder.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "monograph/files/atomic_file.h"
#include "monograph/files/list_folder.h"
#include "monograph/files/remove_folder.h"

namespace monograph::files {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMarker = "monograph-staging";
// Each round another process finished between two of our calls.
constexpr int kLockAttempts = 8;

bool is_empty_folder(const fs::path& folder) { return list_folder(folder).empty(); }

bool holds_checkpoint(const fs::path& folder) {
  const std::vector<std::string> names = list_folder(folder);
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return name == "config.json" || name.ends_with(".safetensors");
  });
}

bool is_or_lies_in(const fs::path& inner, const fs::path& outer) {
  return std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

// Canonical as far as it exists; without a separator at the end.
fs::path absolute_target(const fs::path& given) {
  fs::path target = fs::weakly_canonical(fs::absolute(given).parent_path()) / given.filename();
  if (given.filename().empty() || given.filename() == "." || given.filename() == "..") {
    target = fs::weakly_canonical(given);
    if (target.filename().empty()) target = target.parent_path();
  }
  return target;
}

}  // namespace

StagedFolder::StagedFolder(const fs::path& target, Existing existing,
                           std::span<const fs::path> input_folders, FileOps& ops)
    : ops_(ops),
      existing_(existing),
      target_(absolute_target(target)),
      parent_(target_.parent_path()),
      staging_(parent_ / std::string(".").append(target_.filename().string()).append(".partial")),
      contents_(staging_ / "new") {
  if (target_.filename().empty()) throw Error(target.string() + ": is no folder that can be made");
  try {
    take_staging();
    check_target(target_, existing_, input_folders);
    if (ops_.mkdir(contents_.c_str(), 0777) != 0) fail("cannot make the folder", errno);
  } catch (...) {
    discard();
    throw;
  }
}

StagedFolder::~StagedFolder() { discard(); }

void StagedFolder::fail(const std::string& what, int code) const {
  throw IoError(target_, what, code);
}

void StagedFolder::check_target(const fs::path& target, Existing existing,
                                std::span<const fs::path> input_folders) {
  const fs::path place = absolute_target(target);
  const auto refuse = [&place](const std::string& what) { throw Error(place.string() + what); };
  for (const fs::path& folder : input_folders) {
    std::error_code error;
    const fs::path input = fs::weakly_canonical(folder, error);
    if (is_or_lies_in(place, input) || is_or_lies_in(input, place)) {
      refuse(": overlaps " + input.string() + ", which is read; write elsewhere");
    }
  }
  std::error_code ignored;
  const fs::file_status status = fs::symlink_status(place, ignored);
  if (!fs::exists(status)) return;
  if (!fs::is_directory(status)) refuse(": exists and is not a folder");
  if (is_empty_folder(place)) return;
  if (existing == Existing::kRefuse) {
    refuse(": exists; choose another name, or --force to replace it");
  }
  if (!holds_checkpoint(place)) {
    refuse(": holds neither config.json nor a .safetensors file, so it is not replaced");
  }
}

// Makes ".NAME.partial" or opens the one that is there, and locks it. Whether it was made.
bool StagedFolder::lock_staging() {
  for (int attempt = 0; attempt < kLockAttempts; ++attempt) {
    const bool made = ops_.mkdir(staging_.c_str(), 0777) == 0;
    if (!made && errno != EEXIST) fail("cannot create " + staging_.string(), errno);
    const int fd =
        ops_.open(staging_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW, /*mode=*/0);
    if (fd < 0 && errno == ENOENT) continue;  // its owner has just finished
    if (fd < 0) fail("cannot open " + staging_.string(), errno);
    const bool locked = ops_.flock(fd, LOCK_EX | LOCK_NB) == 0;
    const int code = errno;
    struct stat held {
    }, named{};
    // The owner may have finished before the lock: then it is one on a folder without a name, and
    // the name is free, or that of somebody else's folder.
    const bool same = ops_.fstat(fd, &held) == 0 && ops_.stat(staging_.c_str(), &named) == 0 &&
                      id_of(held) == id_of(named);
    // A file system without locks cannot tell a dead owner from a living one.
    if (same && (locked || (code != EWOULDBLOCK && made))) {
      lock_ = fd;
      return made;
    }
    ops_.close(fd);
    if (!locked) fail("another process is writing it, or left " + staging_.string(), EBUSY);
  }
  fail("other processes are writing it, or " + staging_.string() + " cannot be looked at", EBUSY);
}

// Makes ".NAME.partial", or takes over the one of a dead process.
void StagedFolder::take_staging() {
  const bool made = lock_staging();
  const fs::path marker = staging_ / kMarker;
  std::error_code ignored;
  if (!made && !fs::exists(marker, ignored) && !is_empty_folder(staging_)) {
    ops_.close(std::exchange(lock_, -1));
    throw Error(staging_.string() + ": is in the way and was not made by this program");
  }
  const int fd = ops_.open(marker.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (fd < 0) fail("cannot write to " + staging_.string(), errno);
  ops_.close(fd);
  if (!made && !remove_folder(contents_, ops_)) {
    fail("cannot remove what an earlier run left in " + contents_.string(), errno);
  }
}

void StagedFolder::sync(const fs::path& folder, const char* what) const {
  const int fd = ops_.open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, /*mode=*/0);
  if (fd < 0) fail(what, errno);
  const int code = ops_.fsync(fd) == 0 ? 0 : errno;
  ops_.close(fd);
  // Some network file systems cannot sync a folder.
  const bool unsupported = code == EINVAL || code == EOPNOTSUPP || code == ENOSYS;
  if (code != 0 && !unsupported) fail(what, code);
}

void StagedFolder::commit() {
  std::error_code error;
  for (const std::string& name : list_folder(contents_)) {
    if (!fs::is_directory(contents_ / name, error)) continue;
    sync(contents_ / name, "cannot sync a folder of it to disk");
  }
  sync(contents_, "cannot sync it to disk");
  const bool replaces =
      existing_ == Existing::kReplace && fs::exists(target_, error) && !is_empty_folder(target_);
  if (replaces) {
    if (ops_.exchange(contents_.c_str(), target_.c_str()) != 0) {
      fail("cannot be exchanged with the new folder (remove the old one first)", errno);
    }
  } else if (ops_.rename(contents_.c_str(), target_.c_str()) != 0) {
    fail("cannot rename the new folder", errno);
  }
  sync(parent_, "is in place, but the folder around it cannot be synced to disk");
  // What cannot be removed is found by the next run.
  discard();
}

// False if something is left.
bool StagedFolder::discard() noexcept {
  if (lock_ < 0) return true;
  bool gone = false;
  try {
    // The marker goes last: without it the next run would not know the rest for its own.
    gone = remove_folder(contents_, ops_) && ops_.unlink((staging_ / kMarker).c_str()) == 0 &&
           ops_.rmdir(staging_.c_str()) == 0;
  } catch (...) {  // out of memory, or a folder that cannot be listed
  }
  ops_.close(std::exchange(lock_, -1));
  return gone;
}

}  // namespace monograph::files
