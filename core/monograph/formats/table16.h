// What the 4-bit formats share: sixteen values and two codes a byte. A format derives from this
// with its own table and its own block_scale().
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/base/float_types.h"
#include "monograph/base/nibbles.h"
#include "monograph/formats/packed_view.h"

namespace monograph {

template <class Self, Nibbles kOrderOfNibbles>
struct Table16Format {
  static constexpr std::size_t kPerByte = 2;  // elements
  static constexpr Nibbles kNibbles = kOrderOfNibbles;

  // The sixteen values times the scale, rounded to T once a block: 16 roundings instead of `block`,
  // and the same bits as looking up first.
  template <class V, class T>
  [[gnu::always_inline]] static auto prepare(float scale) {
    return V::template scaled_table<T>(Self::kValues, scale);
  }

  // V::kLanes<T> elements, in order, from V::kLanes<T> / 2 bytes.
  template <class V, class T, class Prepared>
  [[gnu::always_inline]] static auto decode(const Prepared& table, const std::uint8_t* packed) {
    return V::template lookup<T, kNibbles>(table, packed);
  }

  // One element: for tails and odd starts.
  template <class T>
  [[gnu::always_inline]] static T decode_one(const std::uint8_t* values, std::size_t element,
                                             float scale) {
    const std::uint8_t byte = values[element / 2];
    const bool high = (element % 2 == 0) == (kNibbles == Nibbles::kHighFirst);
    return from_float<T>(Self::kValues[high ? byte >> 4 : byte & 15u] * scale);
  }
};

}  // namespace monograph
