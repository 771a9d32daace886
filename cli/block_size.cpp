#include "block_size.h"

#include <algorithm>
#include <cstdint>

#include "monograph/quant_methods/packed_parts.h"
#include "usage_error.h"

namespace monograph::cli {

std::size_t block_size(Format format, std::optional<std::size_t> given, const std::string& dashes) {
  const FormatInfo& info = *find_format(format);
  // A number below 0 came in as one beyond this.
  if (given && *given > SIZE_MAX / 2) {
    throw UsageError(dashes + "block-size " + std::to_string(static_cast<std::ptrdiff_t>(*given)) +
                     ": wanted a number above 0, or 0 where it is the row");
  }
  if (info.shape == BlockShape::kGroup) {
    const bool by_row = info.bits == 8;
    if (!given) return by_row ? 0 : 128;
    if (*given == 0 || (block_fits(info, *given) && info.zero_points != ZeroPoints::kNone)) {
      return *given;
    }
    throw UsageError(
        dashes + "block-size " + std::to_string(*given) + ": wanted 0, the row" +
        (info.zero_points == ZeroPoints::kNone ? ", the only one of fp8" : ", or a part of it"));
  }
  if (!given) return std::clamp<std::size_t>(64, info.smallest_block, info.largest_block);
  if (block_fits(info, *given)) return *given;
  const std::string wanted = info.smallest_block == info.largest_block
                                 ? std::to_string(info.smallest_block) + ", the only one of " +
                                       std::string(written_name(format))
                                 : "a power of two from " + std::to_string(info.smallest_block) +
                                       " to " + std::to_string(info.largest_block);
  throw UsageError(dashes + "block-size " + std::to_string(*given) + ": wanted " + wanted);
}

ScaleRule zero_point_rule(Format format, bool asymmetric, const std::string& dashes) {
  if (!asymmetric) return ScaleRule::kDefault;
  if (find_format(format)->zero_points != ZeroPoints::kNone) return ScaleRule::kMinMax;
  throw UsageError(dashes + "asymmetric: " + std::string(written_name(format)) +
                   " has no zero points; int4 and int8 have");
}

void check_double_quant(Format format, bool wanted, const std::string& dashes) {
  if (!wanted || find_format(format)->double_quant) return;
  throw UsageError(dashes + "double-quant: " + std::string(written_name(format)) +
                   " has no double quantisation; nf4 and fp4 have");
}

}  // namespace monograph::cli
