// The JSON that bitsandbytes stores next to a 4-bit weight, as a uint8 tensor
// NAME.quant_state.bitsandbytes__nf4 or ..__fp4. It decides how many bytes are read where, so every
// word of it is checked.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/formats/format.h"

namespace monograph {

// bitsandbytes writes about 150 bytes.
inline constexpr std::size_t kMaxQuantStateBytes = 4096;

struct QuantState {
  Format format = Format::kNf4;
  std::size_t block = 0;
  DType dtype = DType::kBFloat16;    // of the weight that was quantised
  std::vector<std::uint64_t> shape;  // at least one dimension
  std::uint64_t elements = 0;
  bool nested = false;  // the scales are quantised themselves, in groups of 256
  float offset = 0.0f;  // nested only; finite
};

// Throws Error, with `source` in its message, unless `json` is an object of the known keys that
// agrees with `format` (from the name of the tensor): a block size of the format, a known dtype, a
// shape whose product does not overflow, and all or none of the three nested keys.
QuantState parse_quant_state(std::string_view json, Format format, std::string_view source);

// What bitsandbytes would write, filled with blanks to a length that depends on format, block,
// dtype and shape alone: a header states it before the offset is known.
std::string quant_state_text(const QuantState& state);

}  // namespace monograph
