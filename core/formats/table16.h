// What NF4 and FP4 share: sixteen values, two codes a byte with the even element in the high
// nibble, one scale a flat block. A format derives from this with its own table.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/float_types.h"
#include "formats/absmax_scales.h"

namespace monograph {

template <class Self>
struct Table16Format {
  static constexpr std::size_t kPerByte = 2;  // elements

  static float block_scale(const PackedView& weight, std::size_t block) {
    return absmax_scale(weight.scales, block);
  }

  // The sixteen values times the scale, rounded to T once a block: 16 roundings instead of `block`,
  // and the same bits as looking up first.
  template <class V, class T>
  [[gnu::always_inline]] static auto prepare(float scale) {
    return V::template scaled_table<T>(Self::kValues, scale);
  }

  // V::kLanes<T> elements, in order, from V::kLanes<T> / 2 bytes.
  template <class V, class T, class Prepared>
  [[gnu::always_inline]] static auto decode(const Prepared& table, const std::uint8_t* packed) {
    return V::template lookup<T>(table, packed);
  }

  // One element: for tails and odd starts.
  template <class T>
  [[gnu::always_inline]] static T decode_one(const std::uint8_t* values, std::size_t element,
                                             float scale) {
    const std::uint8_t byte = values[element / 2];
    const unsigned code = element % 2 == 0 ? byte >> 4 : byte & 15u;
    return from_float<T>(Self::kValues[code] * scale);
  }
};

}  // namespace monograph
