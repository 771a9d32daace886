// The algorithm, once, for every format and every SIMD vocabulary.
#pragma once

#include "base/float_types.h"
#include "formats/all.h"
#include "formats/decode_row.h"
#include "kernels/dequantize/dequantize.h"

namespace monograph {

template <class F, class V>
void dequantize_with(const PackedView& weight, std::size_t row, std::size_t begin, std::size_t end,
                     DType dtype, void* out) {
  with_type(
      dtype, [&]<class T>() __attribute__((always_inline)) {
        decode_row<F, V>(weight, row, begin, end, static_cast<T*>(out));
      });
}

template <class V, class... Fs>
[[gnu::always_inline]] inline DequantizeFn* find_dequantize(FormatList<Fs...>, Format format) {
  DequantizeFn* run = nullptr;
  ((format == Fs::kFormat ? void(run = dequantize_with<Fs, V>) : void()), ...);
  return run;
}

template <class V>
DequantizeFn* dequantize_variant(Format format) {
  return find_dequantize<V>(PackedFormats{}, format);
}

}  // namespace monograph
