// Memory whose size follows the number of tokens.
#pragma once

#include <cstddef>
#include <utility>

namespace monograph {

// Bytes of a call, aligned to 64, contents undefined. From Scratch::kHugeBytes on they lie on huge
// pages where the system has them. The calling thread keeps what it gave back, for fresh pages cost
// more than writing, as long as that and what it holds are at most kKeptBytes together. Throws
// std::bad_alloc.
class Buffer {
 public:
  static constexpr std::size_t kKeptBytes = std::size_t{64} << 20;

  Buffer() = default;
  explicit Buffer(std::size_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  std::byte* data() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// A hint for memory that is written for the first time: small pages work too.
void prefer_huge_pages(void* data, std::size_t bytes);

}  // namespace monograph
