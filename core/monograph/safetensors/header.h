// The JSON header of a safetensors file: parsed and held to every rule of the format, once. Knows
// bytes, not files.
//
// A file is a 64-bit little-endian length N, N bytes of JSON, and the data:
//   {"__metadata__": {"key": "text"},
//    "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
// Offsets count from the first byte of the data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/safetensors/stored_dtype.h"

namespace monograph::safetensors {

// The reference reader and writer refuse more.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
// Ours. They bound the memory that a header can claim before it is refused; no tool of the field
// goes near them (torch and NumPy stop at 64 dimensions, 100 MB of real entries are under 10^6).
inline constexpr std::size_t kMaxRank = 64;
inline constexpr std::size_t kMaxTensors = 1'000'000;
inline constexpr std::size_t kMaxMetadataPairs = 1'000'000;

inline constexpr std::size_t kLengthBytes = 8;
inline constexpr std::string_view kMetadataKey = "__metadata__";

// A tensor whose place is proven to lie inside the file: use offset_bytes and size_bytes, never a
// size computed again from the shape.
struct TensorEntry {
  std::string name;
  StoredDType dtype = StoredDType::kU8;
  std::vector<std::uint64_t> shape;  // row-major; empty for a scalar
  std::uint64_t offset_bytes = 0;    // from the start of the file
  std::uint64_t size_bytes = 0;
  std::uint64_t elements = 0;  // the product of shape: size_bytes * 8 / bits_of(dtype)
};

// Sorted, so that the same metadata always gives the same bytes.
using Metadata = std::map<std::string, std::string>;

// "[2, 3]", for messages.
std::string shape_text(const std::vector<std::uint64_t>& shape);

struct Header {
  std::vector<TensorEntry> tensors;  // in the order of their bytes; together they are all the data
  Metadata metadata;
  std::uint64_t data_offset_bytes = 0;  // 8 + N
  std::vector<std::uint32_t> by_name;   // indexes into tensors, sorted by name

  const TensorEntry* find(std::string_view name) const;  // nullptr if there is none
};

// `bytes` begins a file of file_size_bytes and holds at least its header (a mapping of the whole
// file, or just the first 8 + N bytes). `source` names the file in messages. Throws Error at the
// first rule broken:
//   length     8 bytes for N; N <= kMaxHeaderBytes; 8 + N <= file size
//   JSON       RFC 8259, UTF-8, one object; blanks before and after it are accepted (space, tab,
//              line feed, carriage return), as the Rust reader does on purpose, though the format's
//              page says it begins with '{'; no byte order mark
//   keys       no duplicate at any level; an entry has dtype, shape and data_offsets and no other
//              key; __metadata__ maps strings to strings
//   entries    a known dtype; at most kMaxRank whole numbers in shape; two in data_offsets;
//              begin <= end <= size of the data
//   size       product of shape x bits is a whole number of bytes and equals end - begin; neither
//              it nor the product of the non-zero dimensions overflows
//   layout     sorted by offset, the first tensor begins at 0, each begins where the one before
//              ended (no holes, no overlap), the last ends with the file
// Stricter than the Rust reader, which accepts: other keys in an entry, duplicate tensor and
// metadata keys, null for __metadata__, an entry written as an array, a dtype written as an object,
// and more than the three limits above allow. Never more lenient.
Header parse_header(std::span<const std::uint8_t> bytes, std::uint64_t file_size_bytes,
                    std::string_view source);

}  // namespace monograph::safetensors
