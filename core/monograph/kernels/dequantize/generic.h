// The algorithm, once, for every format and every SIMD vocabulary.
#pragma once

#include "monograph/base/float_types.h"
#include "monograph/formats/all.h"
#include "monograph/formats/decode_row.h"
#include "monograph/kernels/dequantize/dequantize.h"

namespace monograph {

// The vocabulary V with every store past the caches.
template <class V>
struct Streaming : V {
  using Narrow = Streaming<typename V::Narrow>;
  template <class T>
  [[gnu::always_inline]] static void store(T* out, typename V::template Vec<T> v) {
    V::template stream<T>(out, v);
  }
};

template <class F, class V>
void dequantize_with(const PackedView& weight, std::size_t row, std::size_t begin, std::size_t end,
                     DType dtype, Stores stores, void* out) {
  with_type(
      dtype, [&]<class T>() __attribute__((always_inline)) {
        if (stores == Stores::kCached) {
          decode_row<F, V>(weight, row, begin, end, static_cast<T*>(out));
        } else {
          decode_row<F, Streaming<V>>(weight, row, begin, end, static_cast<T*>(out));
          V::stream_end();
        }
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
  DequantizeFn* run = find_dequantize<V>(PackedFormats{}, format);
  if (run == nullptr) run = find_dequantize<V>(RowFormats{}, format);
  return run != nullptr ? run : find_dequantize<V>(InterleavedFormats{}, format);
}

}  // namespace monograph
