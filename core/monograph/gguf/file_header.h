// The header of a GGUF file, version 2 or 3, little endian: parsed and held to every rule, once.
// Knows bytes, not files.
//
//   "GGUF", version u32, number of tensors u64, number of pairs u64
//   pairs    key, type u32, value; a string is a u64 length and its bytes; an array is a type u32,
//   a
//            u64 count and the values
//   tensors  name, number of dimensions u32, dimensions u64 with the fastest first, type u32,
//   offset
//            u64 from the begin of the data
//   data     at the next multiple of general.alignment (32 without that pair), each tensor too
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/gguf/file_writer.h"

namespace monograph::gguf {

// Those of ggml where it has one, else ours; they bound what a header can claim.
inline constexpr std::uint64_t kMaxTensors = 1'000'000;
inline constexpr std::uint64_t kMaxPairs = 1'000'000;
inline constexpr std::uint64_t kMaxKeyBytes = 65'535;
inline constexpr std::uint64_t kMaxNameBytes = 63;
inline constexpr std::uint32_t kMaxDimensions = 4;

enum class ValueType : std::uint32_t {
  kU8 = 0,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64,
};
// "u32"; "array".
std::string_view name_of(ValueType type);

// A value where it lies: `bytes` is the number, the text without its length, or all of the array's
// values, strings with their lengths.
struct PairView {
  std::string_view key;
  ValueType type = ValueType::kU8;
  ValueType element = ValueType::kU8;  // of an array
  std::uint64_t count = 1;             // of an array
  std::span<const std::uint8_t> bytes;

  // Nothing if the value is of another kind: a whole number not below 0, any number, a text.
  std::optional<std::uint64_t> whole() const;
  std::optional<double> number() const;
  std::optional<std::string_view> text() const;
};

struct FileHeader {
  std::uint32_t version = 0;
  std::uint64_t alignment = 32;
  std::uint64_t data_offset_bytes = 0;  // from the begin of the file
  std::vector<PairView> pairs;          // in the file's order; views of the bytes given
  std::vector<TensorInfo> tensors;      // in the file's order; offsets from the begin of the data

  const PairView* find(std::string_view key) const;  // null if there is none
  // general.architecture, or "" if there is none.
  std::string_view architecture() const;
  const TensorInfo* find_tensor(std::string_view name) const;
};

// `bytes` is the whole file, `source` its name in messages. Throws Error at the first rule broken:
// magic, version and byte order; limits above; UTF-8 keys and names, none twice; known types of
// values, arrays of no arrays; an alignment that is a power of two; known types of tensors, rows of
// whole blocks, no dimension 0, no overflow; offsets one behind the other as ggml wants them; every
// tensor inside the file, and nothing behind the last but its padding.
FileHeader parse_file_header(std::span<const std::uint8_t> bytes, std::string_view source);

}  // namespace monograph::gguf
