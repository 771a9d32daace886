// What both passes for few rows share: sizes, the job as the kernels see it, the choice of a
// kernel.
#pragma once

#include <cstddef>

#include "monograph/kernels/linear/few_decode.h"
#include "monograph/kernels/linear/generic.h"

namespace monograph {

// Specialised beside each instantiation: kMost, the most rows that are few; kRows, those at a time;
// kSums, accumulators; kDxRows and kDxPanel, rows and columns of dx at a time.
template <class V>
struct FewBlock;

// The numbers of rows that have a kernel of their own; others are filled up with zeros.
[[gnu::always_inline]] constexpr std::size_t filled_rows(std::size_t rows, std::size_t most) {
  return rows <= 2 ? rows : rows <= 4 && most >= 4 ? 4 : most;
}

// decode_rows() of the weight's format and the type of the activations.
using DecodeRowsFn = void(const LinearWeight&, std::size_t first, std::size_t rows,
                          std::size_t begin, std::size_t count, float* out, std::size_t stride);

struct FewJob {
  const MultiplyJob& multiply;
  const DecodeJob& decode;
  DType dtype;
  DecodeRowsFn* decode_rows;
};

// One product: Kernels::panel<F, kM>(job) for the kernel that has so many rows, then what remains.
template <class Kernels, class V, class F, class T>
void multiply_few(const MultiplyJob& multiply, const DecodeJob& decode) {
  const FewJob job = {multiply, decode, dtype_of<T>, decode_rows<RowsOf<F>, V, T>};
  const std::size_t rows = filled_rows(multiply.rows, Kernels::kRows);
  if (rows == 1) Kernels::template panel<Decoded<F, T>, 1>(job);
  if (rows == 2) Kernels::template panel<Decoded<F, T>, 2>(job);
  if constexpr (Kernels::kRows >= 4)
    if (rows == 4) Kernels::template panel<Decoded<F, T>, 4>(job);
  if constexpr (Kernels::kRows > 4)
    if (rows == Kernels::kRows) Kernels::template panel<Decoded<F, T>, Kernels::kRows>(job);
  if (multiply.finish != nullptr) finish_rows<V, T, Kernels::kPanel>(*multiply.finish);
}

// `width` rows of the left operand from `first` on as [reduction][row], filled up with zeros.
template <class T>
[[gnu::always_inline]] inline void pack_transposed(const PackJob& job, std::size_t first,
                                                   std::size_t width, float* out) {
  for (std::size_t r = 0; r < width; ++r) {
    const bool there = first + r < job.rows;
    const T* in = static_cast<const T*>(job.data) + job.begin;
    if (there) in += (first + r) * job.stride;
    for (std::size_t i = 0; i < job.count; ++i) out[i * width + r] = there ? to_float(in[i]) : 0.0f;
  }
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
  if (in_list(RowFormats{}, format)) found = multiply_few<Kernels, V, ByRows, T>;
  if (format == Int4Units::kFormat) found = multiply_few<Kernels, V, Int4Units, T>;
  ((format == Fs::kFormat ? void(found = multiply_few<Kernels, V, Fs, T>) : void()), ...);
  return found;
}
template <class Kernels, class V, class T>
DirectFn* few_direct(const DecodeJob& job) {
  return find_few<Kernels, V, T>(PackedFormats{}, job.weight->packed.format);
}

}  // namespace monograph
