#include "monograph/files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

namespace monograph::files {
namespace {

constexpr int kReadFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;

// Closes when the mapping is made or has failed; a mapping needs no descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path, std::uint64_t max_bytes) {
  map(::open(path.c_str(), kReadFlags), path, max_bytes);
}

MappedFile::MappedFile(const std::filesystem::path& resolved, const std::filesystem::path& shown,
                       std::uint64_t max_bytes) {
  map(::open(resolved.c_str(), kReadFlags | O_NOFOLLOW), shown, max_bytes);
}

void MappedFile::map(int fd, const std::filesystem::path& path, std::uint64_t max_bytes) {
  const Descriptor file(fd);
  if (file.get() < 0) throw IoError(path, "cannot open", errno);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw IoError(path, "cannot look at it", errno);
  if (!S_ISREG(status.st_mode)) throw Error(path.string() + ": is not a regular file");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size > max_bytes) {
    throw Error(path.string() + ": has " + std::to_string(size) + " bytes, at most " +
                std::to_string(max_bytes) + " are allowed");
  }
  id_ = id_of(status);
  if (size == 0) return;  // mmap refuses empty ranges
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) throw IoError(path, "cannot map", errno);
  data_ = static_cast<const std::uint8_t*>(data);
  size_ = size;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::uint8_t*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      id_(other.id_) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(id_, other.id_);
  return *this;
}

}  // namespace monograph::files
