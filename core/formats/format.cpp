#include "formats/format.h"

#include <array>
#include <bit>

namespace monograph {
namespace {

constexpr std::array kFormats = {
    FormatInfo{Format::kNf4, "nf4", 4, BlockShape::kFlat, 32, 4096, /*double_quant=*/true},
    FormatInfo{Format::kFp4, "fp4", 4, BlockShape::kFlat, 32, 4096, /*double_quant=*/true},
};

}  // namespace

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
