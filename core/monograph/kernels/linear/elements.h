// A piece of a row of any weight, in order and in the type of the activations.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "monograph/base/float_types.h"
#include "monograph/formats/all.h"
#include "monograph/formats/decode_row.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/linear/kernels.h"

namespace monograph {

// Takes the place of a packed format for a weight that is not packed.
struct Plain {
  static constexpr Format kFormat = Format::kPlain;
};

// Takes the place of every format that is decoded_by_rows(): products are instantiated once for all
// of them. Rows are decoded by a function of the format: the one to places (placed_rows.h), or that
// of `dequantize`.
struct ByRows {
  static constexpr Format kFormat = Format::kPlain;
};

template <class F, class V, class T>
[[gnu::always_inline]] inline void decode_elements(const LinearWeight& weight, std::size_t row,
                                                   std::size_t begin, std::size_t end, T* out) {
  if constexpr (std::is_same_v<F, Plain>) {
    with_type(
        weight.dtype, [&]<class S>() __attribute__((always_inline)) {
          const std::uint8_t* in =
              weight.packed.values + weight.packed.element(row, begin) * sizeof(S);
          if constexpr (std::is_same_v<S, T>) {
            std::memcpy(out, in, (end - begin) * sizeof(T));
          } else {
            for (std::size_t i = 0; i < end - begin; ++i, in += sizeof(S)) {
              S element;
              std::memcpy(&element, in, sizeof(S));
              out[i] = from_float<T>(to_float(element));
            }
          }
        });
  } else if constexpr (std::is_same_v<F, ByRows>) {
    row_decoder(weight.packed.format)(weight.packed, row, begin, end, dtype_of<T>, Stores::kCached,
                                      out);
  } else {
    decode_row<F, V>(weight.packed, row, begin, end, out);
  }
}

// choose.template operator()<F>() for the format F named by `format`, nullptr if there is none.
template <class Choose, class... Fs>
[[gnu::always_inline]] inline DecodeFn* find_decoder(FormatList<Fs...>, Format format,
                                                     Choose choose) {
  DecodeFn* decode = nullptr;
  if (format == Format::kPlain) decode = choose.template operator()<Plain>();
  if (decoded_by_rows(format)) decode = choose.template operator()<ByRows>();
  ((format == Fs::kFormat ? void(decode = choose.template operator()<Fs>()) : void()), ...);
  return decode;
}

}  // namespace monograph
