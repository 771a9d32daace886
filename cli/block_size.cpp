#include "block_size.h"

#include <algorithm>

#include "monograph/quant_methods/packed_parts.h"
#include "usage_error.h"

namespace monograph::cli {

std::size_t block_size(Format format, std::optional<std::size_t> given) {
  const FormatInfo& info = *find_format(format);
  if (!given) return std::clamp<std::size_t>(64, info.smallest_block, info.largest_block);
  if (block_fits(info, *given)) return *given;
  const std::string wanted = info.smallest_block == info.largest_block
                                 ? std::to_string(info.smallest_block) + ", the only one of " +
                                       std::string(written_name(format))
                                 : "a power of two from " + std::to_string(info.smallest_block) +
                                       " to " + std::to_string(info.largest_block);
  throw UsageError("--block-size " + std::to_string(*given) + ": wanted " + wanted);
}

void check_double_quant(Format format, bool wanted) {
  if (!wanted || find_format(format)->double_quant) return;
  throw UsageError("--double-quant: " + std::string(written_name(format)) +
                   " has no double quantisation; nf4 and fp4 have");
}

}  // namespace monograph::cli
