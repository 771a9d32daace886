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
};

}  // namespace

const char* name_of(ScaleKind kind) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "e8m0", "e4m3"};
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
                                    "transformers"};
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

bool block_fits(const FormatInfo& info, std::size_t block) {
  return std::has_single_bit(block) && block >= info.smallest_block && block <= info.largest_block;
}

}  // namespace monograph
