#include "output_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "monograph/files/file_ops.h"

namespace monograph::cli {
namespace {

bool is_at(const std::filesystem::path& path, int descriptor) {
  struct stat here = {}, held = {};
  return ::stat(path.c_str(), &here) == 0 && ::fstat(descriptor, &held) == 0 &&
         here.st_dev == held.st_dev && here.st_ino == held.st_ino;
}

std::string host() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "?";
}

}  // namespace

OutputLock::OutputLock(const std::filesystem::path& folder) : path_(folder / ".monograph.lock") {
  std::filesystem::create_directories(folder);
  while (true) {
    const int descriptor = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (descriptor < 0) throw files::IoError(path_, "cannot be opened", errno);
    if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
      const int code = errno;
      ::close(descriptor);
      if (code == ENOLCK || code == ENOTSUP) return;
      if (code != EWOULDBLOCK) throw files::IoError(path_, "cannot be locked", code);
      throw Error("output_dir: another run writes into " + folder.string() +
                  "; wait for it, or write another output_dir");
    }
    if (is_at(path_, descriptor)) {
      descriptor_ = descriptor;
      break;
    }
    ::close(descriptor);  // of a run that has just ended and taken its name away
  }
  const std::string owner = "process " + std::to_string(::getpid()) + " on " + host() + "\n";
  // Only for people: who holds the folder is told by the lock itself.
  if (::ftruncate(descriptor_, 0) != 0 ||
      ::write(descriptor_, owner.data(), owner.size()) != static_cast<ssize_t>(owner.size()))
    return;
}

OutputLock::~OutputLock() {
  if (descriptor_ < 0) return;
  ::unlink(path_.c_str());  // while it is locked
  ::close(descriptor_);
}

}  // namespace monograph::cli
