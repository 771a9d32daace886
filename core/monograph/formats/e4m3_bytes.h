// E4M3 elements, one a byte: what MXFP8 and FP8 with 128 x 128 blocks share.
//   decode: value(code) * scale, one rounding to fp32, one to the output type; exact for all 256
//   codes, the 14 subnormals and two NaNs included.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/base/float_types.h"
#include "monograph/base/minifloat.h"

namespace monograph {

template <class Self>
struct E4m3Format {
  using Element = E4m3;
  static constexpr std::size_t kPerByte = 1;

  template <class V, class T>
  [[gnu::always_inline]] static auto prepare(float scale) {
    return V::template e4m3_scale<T>(scale);
  }

  template <class V, class T>
  [[gnu::always_inline]] static auto decode(const auto& scale, const std::uint8_t* packed) {
    return V::template scaled_e4m3<T>(packed, scale);
  }

  template <class T>
  [[gnu::always_inline]] static T decode_one(const std::uint8_t* values, std::size_t element,
                                             float scale) {
    return from_float<T>(E4m3::decode(values[element]) * scale);
  }
};

}  // namespace monograph
