// The storage formats: one enumerator, one row in the table, one file next to this one, one row in
// docs/reference/formats.md.
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
  kMxfp4 = 3,
  kMxfp8 = 4,
  kNvfp4 = 5,
  kNvfp4Divide = 6,
  kFp8Block = 7,
};

// How a scale block lies on the weight.
enum class BlockShape : std::uint8_t {
  kFlat,    // `block` consecutive elements of the flattened tensor; a block may straddle rows
  kRow,     // `block` elements of a row; rows are whole blocks, so it counts like kFlat
  kSquare,  // `block` x `block`, the grid anchored at each matrix's first element; partial at ends
};

// How the scale of one block is stored.
enum class ScaleKind : std::uint8_t { kFp32, kBf16, kE8m0, kE4m3 };
constexpr std::size_t size_bytes(ScaleKind kind) {
  return kind == ScaleKind::kFp32 ? 4 : kind == ScaleKind::kBf16 ? 2 : 1;
}
const char* name_of(ScaleKind kind);

// One fp32 number for a whole matrix beside the scales of its blocks.
enum class TensorScale : std::uint8_t { kNone, kMultiplies, kDivides };

// How a quantiser chooses scales. What a rule means for a format is written in the format's file.
// The numbers travel in operator calls: never reuse one.
enum class ScaleRule : std::uint8_t {
  kDefault = 0,  // the first of the format's rules
  kAbsmax = 1,
  kFloor = 2,
  kCeil = 3,
  kEven = 4,
  kRceil = 5,
  kTransformerEngine = 6,
  kTorchao = 7,
  kCompressedTensors = 8,
  kModelOpt = 9,
  kTransformers = 10,
};
const char* name_of(ScaleRule rule);

struct FormatInfo {
  Format format;
  const char* name;
  Format kernels;  // the format whose kernels serve it
  int bits;        // of one element
  BlockShape shape;
  std::size_t smallest_block, largest_block;  // powers of two
  bool double_quant;                          // scales may be quantised themselves
  TensorScale tensor_scale;
  std::span<const ScaleKind> kinds;  // the first is what quantize() gives unless told otherwise
  std::span<const ScaleRule> rules;  // the first is the default
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

// Blocks of `matrices` matrices of rows x cols each.
constexpr std::size_t block_count(BlockShape shape, std::size_t block, std::size_t matrices,
                                  std::size_t rows, std::size_t cols) {
  if (shape == BlockShape::kSquare) return matrices * ceil_div(rows, block) * ceil_div(cols, block);
  return ceil_div(matrices * rows * cols, block);
}

}  // namespace monograph
