#include "monograph/formats/format.h"

#include <array>
#include <bit>

namespace monograph {
namespace {

using enum ScaleKind;
using enum ScaleRule;

constexpr std::array kAbsmaxKinds = {kFp32};
constexpr std::array kAbsmaxRules = {kAbsmax};
constexpr std::array kMxKinds = {kE8m0};
constexpr std::array kMxfp4Rules = {kEven, kFloor, kCeil, kRceil, kTransformerEngine};
constexpr std::array kMxfp8Rules = {
    kRceil, kFloor, kCeil, kEven, kTransformerEngine, kCompressedTensors};
constexpr std::array kNvfp4Kinds = {kE4m3};
constexpr std::array kNvfp4Rules = {kModelOpt, kTorchao, kTransformerEngine, kCompressedTensors};
constexpr std::array kFp8Kinds = {kFp32, kBf16, kE8m0};
constexpr std::array kFp8Rules = {kAbsmax, kTransformers, kTransformerEngine, kCompressedTensors};

// The four codes in groups of a row, and the three types of their scales.
struct GroupCode {
  const char* names[3];
  int bits;
  ZeroPoints zero_points;
  std::size_t row_align;
};
constexpr std::array kGroupKinds = {kBf16, kFp16, kFp32};
constexpr std::array kGroupRules = {kAbsmax, kMinMax};  // the second of integers alone
constexpr GroupCode kInt4Code = {
    {"int4-bf16", "int4-fp16", "int4-fp32"}, 4, ZeroPoints::kPacked, 4};
constexpr GroupCode kInt8Code = {{"int8-bf16", "int8-fp16", "int8-fp32"}, 8, ZeroPoints::kBytes, 1};
constexpr GroupCode kInt8PackedCode = {
    {"int8-packed-bf16", "int8-packed-fp16", "int8-packed-fp32"}, 8, ZeroPoints::kPacked, 4};
constexpr GroupCode kFp8RowCode = {
    {"fp8-row-bf16", "fp8-row-fp16", "fp8-row-fp32"}, 8, ZeroPoints::kNone, 1};
constexpr std::size_t kAnyGroup = std::size_t{1} << 56;

// `first` is the number of the code's first row, `kernels` that of the code whose kernels serve it.
constexpr FormatInfo group_format(const GroupCode& code, Format first, Format kernels,
                                  std::size_t kind) {
  const auto number = static_cast<std::uint8_t>(static_cast<std::size_t>(first) + kind);
  return {
      static_cast<Format>(number),
      code.names[kind],
      kernels,
      code.bits,
      BlockShape::kGroup,
      1,
      kAnyGroup,
      /*double_quant=*/false,
      TensorScale::kNone,
      std::span<const ScaleKind>(&kGroupKinds[kind], 1),
      std::span<const ScaleRule>(kGroupRules.data(), code.zero_points == ZeroPoints::kNone ? 1 : 2),
      code.zero_points,
      code.row_align};
}

// Blocks of ggml: nothing quantises to them, and their scales are of no kind of their own.
constexpr FormatInfo ggml_format(Format format, const char* name, int bits, std::size_t block,
                                 std::size_t block_bytes) {
  return {format,
          name,
          format,
          bits,
          BlockShape::kInterleaved,
          block,
          block,
          /*double_quant=*/false,
          TensorScale::kNone,
          {},
          {},
          ZeroPoints::kNone,
          1,
          block_bytes};
}

constexpr std::array kFormats = {
    FormatInfo{Format::kNf4, "nf4", Format::kNf4, 4, BlockShape::kFlat, 32, 4096,
               /*double_quant=*/true, TensorScale::kNone, kAbsmaxKinds, kAbsmaxRules},
    FormatInfo{Format::kFp4, "fp4", Format::kFp4, 4, BlockShape::kFlat, 32, 4096,
               /*double_quant=*/true, TensorScale::kNone, kAbsmaxKinds, kAbsmaxRules},
    FormatInfo{Format::kMxfp4, "mxfp4", Format::kMxfp4, 4, BlockShape::kRow, 32, 32,
               /*double_quant=*/false, TensorScale::kNone, kMxKinds, kMxfp4Rules},
    FormatInfo{Format::kMxfp8, "mxfp8", Format::kMxfp8, 8, BlockShape::kRow, 32, 32,
               /*double_quant=*/false, TensorScale::kNone, kMxKinds, kMxfp8Rules},
    FormatInfo{Format::kNvfp4, "nvfp4", Format::kNvfp4, 4, BlockShape::kRow, 16, 16,
               /*double_quant=*/false, TensorScale::kMultiplies, kNvfp4Kinds, kNvfp4Rules},
    FormatInfo{Format::kNvfp4Divide, "nvfp4-divide", Format::kNvfp4, 4, BlockShape::kRow, 16, 16,
               /*double_quant=*/false, TensorScale::kDivides, kNvfp4Kinds, kNvfp4Rules},
    FormatInfo{Format::kFp8Block, "fp8-block", Format::kFp8Block, 8, BlockShape::kSquare, 128, 128,
               /*double_quant=*/false, TensorScale::kNone, kFp8Kinds, kFp8Rules},
    group_format(kInt4Code, Format::kInt4Bf16, Format::kInt4Bf16, 0),
    group_format(kInt4Code, Format::kInt4Bf16, Format::kInt4Bf16, 1),
    group_format(kInt4Code, Format::kInt4Bf16, Format::kInt4Bf16, 2),
    group_format(kInt8Code, Format::kInt8Bf16, Format::kInt8Bf16, 0),
    group_format(kInt8Code, Format::kInt8Bf16, Format::kInt8Bf16, 1),
    group_format(kInt8Code, Format::kInt8Bf16, Format::kInt8Bf16, 2),
    group_format(kInt8PackedCode, Format::kInt8PackedBf16, Format::kInt8Bf16, 0),
    group_format(kInt8PackedCode, Format::kInt8PackedBf16, Format::kInt8Bf16, 1),
    group_format(kInt8PackedCode, Format::kInt8PackedBf16, Format::kInt8Bf16, 2),
    group_format(kFp8RowCode, Format::kFp8RowBf16, Format::kFp8RowBf16, 0),
    group_format(kFp8RowCode, Format::kFp8RowBf16, Format::kFp8RowBf16, 1),
    group_format(kFp8RowCode, Format::kFp8RowBf16, Format::kFp8RowBf16, 2),
    ggml_format(Format::kQ8_0, "q8_0", 8, 32, 34),
    ggml_format(Format::kQ4_0, "q4_0", 4, 32, 18),
    ggml_format(Format::kQ4_1, "q4_1", 4, 32, 20),
    ggml_format(Format::kQ5_0, "q5_0", 5, 32, 22),
    ggml_format(Format::kQ5_1, "q5_1", 5, 32, 24),
    ggml_format(Format::kIq4Nl, "iq4_nl", 4, 32, 18),
    ggml_format(Format::kQ4K, "q4_k", 4, 256, 144),
    ggml_format(Format::kQ5K, "q5_k", 5, 256, 176),
    ggml_format(Format::kQ6K, "q6_k", 6, 256, 210),
    ggml_format(Format::kIq4Xs, "iq4_xs", 4, 256, 136),
    ggml_format(Format::kGgmlMxfp4, "ggml_mxfp4", 4, 32, 17),
};

}  // namespace

const char* name_of(ScaleKind kind) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "e8m0", "e4m3", "float16"};
  return kNames[static_cast<std::size_t>(kind)];
}

const char* name_of(ScaleRule rule) {
  constexpr const char* kNames[] = {"default",
                                    "absmax",
                                    "floor",
                                    "ceil",
                                    "even",
                                    "rceil",
                                    "transformer-engine",
                                    "torchao",
                                    "compressed-tensors",
                                    "modelopt",
                                    "transformers",
                                    "minmax"};
  return kNames[static_cast<std::size_t>(rule)];
}

std::span<const FormatInfo> formats() { return kFormats; }

const FormatInfo* find_format(Format format) {
  for (const FormatInfo& info : kFormats)
    if (info.format == format) return &info;
  return nullptr;
}

const FormatInfo* find_format(std::string_view name) {
  for (const FormatInfo& info : kFormats)
    if (info.name == name) return &info;
  return nullptr;
}

Format with_scale_kind(Format format, ScaleKind kind) {
  const FormatInfo& info = *find_format(format);
  if (info.shape != BlockShape::kGroup) return format;
  std::size_t from = 0, to = 0;
  while (kGroupKinds[from] != info.kinds[0]) ++from;
  while (to + 1 < kGroupKinds.size() && kGroupKinds[to] != kind) ++to;
  return static_cast<Format>(static_cast<std::size_t>(format) - from + to);
}

bool block_fits(const FormatInfo& info, std::size_t block) {
  const bool fits = info.shape == BlockShape::kGroup || std::has_single_bit(block);
  return fits && block >= info.smallest_block && block <= info.largest_block;
}

}  // namespace monograph
