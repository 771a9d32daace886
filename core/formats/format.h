// The storage formats: one enumerator, one row in the table, one file next to this one, one row in
// docs/formats.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace monograph {

// The numbers travel in operator schemas and compiled graphs: never reuse one.
enum class Format : std::uint8_t {
  kPlain = 0,  // not packed: elements of a DType, no scales
  kNf4 = 1,
  kFp4 = 2,
};

// How a scale block lies on the weight.
enum class BlockShape : std::uint8_t {
  kFlat,  // `block` consecutive elements of the flattened tensor; a block may straddle rows
};

struct FormatInfo {
  Format format;
  const char* name;
  int bits;  // of one element
  BlockShape shape;
  std::size_t smallest_block, largest_block;  // powers of two
  bool double_quant;                          // scales may be quantised themselves
};

// Every packed format, in the order of its number.
std::span<const FormatInfo> formats();
const FormatInfo* find_format(Format format);
const FormatInfo* find_format(std::string_view name);

// Whether `block` is a power of two within the format's limits.
bool block_fits(const FormatInfo& info, std::size_t block);

constexpr std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// Bytes of `elements` packed values; the last byte may be half used.
constexpr std::size_t packed_bytes(const FormatInfo& info, std::size_t elements) {
  return ceil_div(elements * static_cast<std::size_t>(info.bits), 8);
}

}  // namespace monograph
