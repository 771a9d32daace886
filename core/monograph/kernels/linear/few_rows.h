// What both passes for few rows share: sizes, the job as the kernels see it, the choice of a
// kernel.
#pragma once

#include <cstddef>
#include <iterator>

#include "monograph/kernels/linear/few_decode.h"
#include "monograph/kernels/linear/generic.h"
#include "monograph/kernels/linear/placed_formats.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

// Specialised beside each instantiation, for the forward and, by names with Dx, for dx: kMost, the
// most rows that are few (measured: docs/explain/kernels.md); kCounts, the numbers of rows that
// have a kernel of their own, ascending; kSums, accumulators. kDxPanel: columns of dx at a time.
template <class V>
struct FewBlock;

template <std::size_t kSize>
constexpr std::size_t last_of(const std::size_t (&counts)[kSize]) {
  return counts[kSize - 1];
}
// Other numbers of rows are filled up with zeros.
template <std::size_t kSize>
[[gnu::always_inline]] constexpr std::size_t filled_rows(std::size_t rows,
                                                         const std::size_t (&counts)[kSize]) {
  std::size_t i = 0;
  while (i + 1 < kSize && counts[i] < rows) ++i;
  return counts[i];
}

struct FewJob {
  const MultiplyJob& multiply;
  const DecodeJob& decode;
  DType dtype;
  PlacedRowsFn* place_rows;
};

// One product: Kernels::panel<F, kM>(job) for the kernel that has so many rows, then what remains.
template <class Kernels, class V, class F, class T>
[[gnu::always_inline]] inline void multiply_placed(const FewJob& job) {
  const std::size_t rows = filled_rows(job.multiply.rows, Kernels::kCounts);
  unrolled<std::size(Kernels::kCounts)>([&](auto i) __attribute__((always_inline)) {
    constexpr std::size_t kM = Kernels::kCounts[i];
    if (rows == kM) Kernels::template panel<Decoded<F, T>, kM>(job);
  });
  const FinishJob* const finish = job.multiply.finish;
  if (finish != nullptr) finish_rows<V, T, Kernels::kPanel>(*finish);
}
template <class Kernels, class V, class F, class T>
void multiply_few(const MultiplyJob& multiply, const DecodeJob& decode) {
  using Order = typename FewOrderOf<V, T>::Type;
  multiply_placed<Kernels, V, F, T>(
      {multiply, decode, dtype_of<T>, placed_rows<RowsOf<F>, Order, T>(*decode.weight)});
}

// `width` rows of the left operand from `first` on, no more than lanes, as [reduction][row], filled
// up with zeros.
template <class Order, class T>
[[gnu::noinline]] inline void pack_transposed(const PackJob& job, std::size_t first,
                                              std::size_t width, float* out) {
  using L = typename Order::L;
  constexpr std::size_t kLanes = L::kLanes;
  const T* const data = static_cast<const T*>(job.data) + job.begin + first * job.stride;
  const std::size_t rows = job.rows - first < width ? job.rows - first : width;
  // Whole squares. A vector is wider than a column: what it writes behind is written again later,
  // and only while that is within the block.
  const std::size_t squares = 4 * width < kLanes ? 0 : job.count / kLanes * kLanes;
  for (std::size_t i = 0; i < squares; i += kLanes) {
    typename L::F32 square[kLanes];
    for (std::size_t r = 0; r < kLanes; ++r)
      square[r] = r < rows ? L::load_as(data + r * job.stride + i) : L::set(0.0f);
    Order::transpose(square);
    for (std::size_t c = 0; c < kLanes; ++c) {
      float* const column = out + (i + c) * width;
      if ((job.count - i - c) * width >= kLanes) {
        L::store(column, square[c]);
      } else {
        alignas(64) float last[kLanes];
        L::store(last, square[c]);
        for (std::size_t r = 0; r < width; ++r) column[r] = last[r];
      }
    }
  }
  for (std::size_t r = 0; r < width; ++r)
    for (std::size_t i = squares; i < job.count; ++i)
      out[i * width + r] = r < rows ? to_float(data[r * job.stride + i]) : 0.0f;
}

// Where there is nothing to sum.
template <class Kernels, class V, class T>
void multiply_nothing(const MultiplyJob& job) {
  for (std::size_t r = 0; r < job.rows; ++r)
    for (std::size_t p = 0; p < job.width && !job.accumulate; ++p)
      job.c[r * Kernels::kPanel + p] = 0.0f;
  if (job.finish != nullptr) finish_rows<V, T, Kernels::kPanel>(*job.finish);
}

template <class Kernels, class V, class T, class... Fs>
DirectFn* find_few(FormatList<Fs...>, Format format) {
  DirectFn* found = nullptr;
  if (format == Format::kPlain) found = multiply_few<Kernels, V, Plain, T>;
  if (decoded_by_rows(format)) found = multiply_few<Kernels, V, ByRows, T>;
  if (format == Int4Units::kFormat) found = multiply_few<Kernels, V, Int4Units, T>;
  ((format == Fs::kFormat ? void(found = multiply_few<Kernels, V, Fs, T>) : void()), ...);
  return found;
}
template <class Kernels, class V, class T>
DirectFn* few_direct(const DecodeJob& job) {
  return find_few<Kernels, V, T>(PackedFormats{}, job.weight->packed.format);
}

}  // namespace monograph
