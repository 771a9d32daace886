// SHA-256 (FIPS 180-4): the hash that Python's hashlib, the Hugging Face Hub and sha256sum have
// too.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "monograph/hash/sha256_blocks.h"

namespace monograph {

class Sha256 {
 public:
  void add(std::span<const std::uint8_t> bytes);
  void add(std::string_view text) {
    add({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  }
  // 64 hexadecimal digits, in lower case. Ends the message.
  std::string hex();

 private:
  Sha256State state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> rest_{};
  std::size_t rest_bytes_ = 0;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace monograph
