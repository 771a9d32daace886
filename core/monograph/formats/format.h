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
  // One code in groups of a row, told apart by the type of its scales: two types of one size cannot
  // be told by their bytes.
  kInt4Bf16 = 8,
  kInt4Fp16 = 9,
  kInt4Fp32 = 10,
  kInt8Bf16 = 11,
  kInt8Fp16 = 12,
  kInt8Fp32 = 13,
  kInt8PackedBf16 = 14,
  kInt8PackedFp16 = 15,
  kInt8PackedFp32 = 16,
  kFp8RowBf16 = 17,
  kFp8RowFp16 = 18,
  kFp8RowFp32 = 19,
  // ggml's blocks, as they lie in a GGUF file.
  kQ8_0 = 20,
  kQ4_0 = 21,
  kQ4_1 = 22,
  kQ5_0 = 23,
  kQ5_1 = 24,
  kIq4Nl = 25,
  kQ4K = 26,
  kQ5K = 27,
  kQ6K = 28,
  kIq4Xs = 29,
  kGgmlMxfp4 = 30,
};

// How a scale block lies on the weight.
enum class BlockShape : std::uint8_t {
  kFlat,    // `block` consecutive elements of the flattened tensor; a block may straddle rows
  kRow,     // `block` elements of a row; rows are whole blocks, so it counts like kFlat
  kSquare,  // `block` x `block`, the grid anchored at each matrix's first element; partial at ends
  kGroup,   // `block` elements of a row, any that divides its length; rows are whole words
  kInterleaved,  // `block` elements of a row, their scales beside them; rows are whole blocks
};

// How the scale of one block is stored.
enum class ScaleKind : std::uint8_t { kFp32, kBf16, kE8m0, kE4m3, kFp16 };
constexpr std::size_t size_bytes(ScaleKind kind) {
  if (kind == ScaleKind::kFp32) return 4;
  return kind == ScaleKind::kBf16 || kind == ScaleKind::kFp16 ? 2 : 1;
}
const char* name_of(ScaleKind kind);

// One fp32 number for a whole matrix beside the scales of its blocks.
enum class TensorScale : std::uint8_t { kNone, kMultiplies, kDivides };

// How the zero points of groups are stored, where a weight has them.
enum class ZeroPoints : std::uint8_t {
  kNone,
  kBytes,   // int8 [rows, groups]
  kPacked,  // codes packed along the rows in words of 32 bits: [ceil(rows * bits / 32), groups]
};

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
  kMinMax = 11,  // with a zero point for each group
};
const char* name_of(ScaleRule rule);

struct FormatInfo {
  Format format;
  const char* name;
  Format kernels;  // the format whose kernels serve it
  int bits;        // of one element
  BlockShape shape;
  std::size_t smallest_block, largest_block;  // powers of two but for kGroup
  bool double_quant;                          // scales may be quantised themselves
  TensorScale tensor_scale;
  std::span<const ScaleKind> kinds;  // the first is what quantize() gives unless told otherwise
  std::span<const ScaleRule> rules;  // the first is the default; none where nothing quantises to it
  ZeroPoints zero_points = ZeroPoints::kNone;
  std::size_t row_align = 1;    // bytes of which rows of values are a multiple
  std::size_t block_bytes = 0;  // of a block with its scales, for kInterleaved
};

// Every packed format, in the order of its number.
std::span<const FormatInfo> formats();
const FormatInfo* find_format(Format format);
const FormatInfo* find_format(std::string_view name);

// The format of the same code with scales of this kind: int4-fp16 of int4-bf16. The format itself
// where it has no groups of a row.
Format with_scale_kind(Format format, ScaleKind kind);

// Whether `block` is a power of two within the format's limits; any size within them for kGroup.
bool block_fits(const FormatInfo& info, std::size_t block);

constexpr std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// Bytes of `elements` packed values; the last byte may be half used. Not for kGroup, whose rows may
// be padded. Whole blocks for kInterleaved.
constexpr std::size_t packed_bytes(const FormatInfo& info, std::size_t elements) {
  if (info.shape == BlockShape::kInterleaved)
    return elements / info.largest_block * info.block_bytes;
  return ceil_div(elements * static_cast<std::size_t>(info.bits), 8);
}

// Bytes of a row of a format with kGroup or kInterleaved, and of the values of `rows` x `cols`
// elements of any.
constexpr std::size_t row_bytes(const FormatInfo& info, std::size_t cols) {
  return ceil_div(packed_bytes(info, cols), info.row_align) * info.row_align;
}
constexpr std::size_t packed_bytes(const FormatInfo& info, std::size_t rows, std::size_t cols) {
  if (info.shape == BlockShape::kGroup) return rows * row_bytes(info, cols);
  return packed_bytes(info, rows * cols);
}

// Bytes of the zero points of `rows` rows of `groups` groups.
constexpr std::size_t zero_point_bytes(const FormatInfo& info, std::size_t rows,
                                       std::size_t groups) {
  if (info.zero_points == ZeroPoints::kNone) return 0;
  if (info.zero_points == ZeroPoints::kBytes) return rows * groups;
  return 4 * ceil_div(rows * static_cast<std::size_t>(info.bits), 32) * groups;
}

// Blocks of `matrices` matrices of rows x cols each.
constexpr std::size_t block_count(BlockShape shape, std::size_t block, std::size_t matrices,
                                  std::size_t rows, std::size_t cols) {
  if (shape == BlockShape::kSquare) return matrices * ceil_div(rows, block) * ceil_div(cols, block);
  return ceil_div(matrices * rows * cols, block);
}

}  // namespace monograph
