// Reads files from standard input, each as a 32-bit little-endian length and that many bytes, and
// prints one line for each: "refuse" with the reason, or "accept" with name (in hexadecimal),
// dtype, shape, offset and size of every tensor. The other half of
// tests/python/native/test_safetensors_differential.py.
#include <cstdint>
#include <iostream>
#include <string>

#include "monograph/base/error.h"
#include "monograph/safetensors/header.h"

namespace {

using namespace monograph::safetensors;

void print(const TensorEntry& entry) {
  std::cout << " ";
  for (const char c : entry.name) {
    const auto byte = static_cast<unsigned char>(c);
    std::cout << "0123456789abcdef"[byte >> 4] << "0123456789abcdef"[byte & 15];
  }
  std::cout << ":" << name_of(entry.dtype) << ":";
  for (const std::uint64_t dimension : entry.shape) std::cout << dimension << ",";
  std::cout << ":" << entry.offset_bytes << ":" << entry.size_bytes;
}

}  // namespace

int main() {
  std::ios::sync_with_stdio(false);
  char length_bytes[4];
  std::string file;
  while (std::cin.read(length_bytes, 4)) {
    std::uint32_t length = 0;
    for (int i = 0; i < 4; ++i) {
      length |= static_cast<std::uint32_t>(static_cast<unsigned char>(length_bytes[i])) << (8 * i);
    }
    file.resize(length);
    if (!std::cin.read(file.data(), static_cast<std::streamsize>(length))) return 1;
    try {
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(file.data());
      const Header header = parse_header({bytes, file.size()}, file.size(), "stdin");
      std::cout << "accept";
      for (const TensorEntry& entry : header.tensors) print(entry);
      std::cout << "\n";
    } catch (const monograph::Error& error) {
      std::cout << "refuse " << error.what() << "\n";
    }
  }
  return 0;
}
