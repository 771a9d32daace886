// The variant list and the parallel driver; no intrinsics here.
#include "monograph/kernels/quantize/quantize.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/formats/all.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
QuantizeFn* quantize_variant(Format format);
template <class V>
AbsmaxFn* absmax_variant();

namespace {

const std::vector<Variant<AbsmaxFn>>& absmax_variants() {
  static const auto rows =
      make_variants<AbsmaxFn>(VectorTargets{}, []<class V>() { return absmax_variant<V>(); });
  return rows;
}

std::uint32_t largest_finite(DType dtype, const void* input, std::size_t count) {
  return with_type(dtype, [&]<class T>() {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float x = to_float(static_cast<const T*>(input)[i]);
      const std::uint32_t a = std::bit_cast<std::uint32_t>(x) & 0x7fffffff;
      if (a < 0x7f800000 && a > largest) largest = a;
    }
    return largest;
  });
}

std::size_t first_nonfinite_of(const QuantizeJob& job) {
  return with_type(job.dtype, [&]<class T>() {
    std::size_t i = 0;
    const T* in = static_cast<const T*>(job.input);
    while (i < job.elements && std::isfinite(to_float(in[i]))) ++i;
    return i;
  });
}

template <class... Fs>
TensorScales scales_for(FormatList<Fs...>, Format format, ScaleRule rule, float absmax) {
  TensorScales scales;
  const auto ask = [&]<class F>() {
    if constexpr (requires { F::choose_tensor_scale(rule, absmax); })
      scales = F::choose_tensor_scale(rule, absmax);
  };
  ((format == Fs::kFormat ? ask.template operator()<Fs>() : void()), ...);
  return scales;
}

}  // namespace

float largest_magnitude(DType dtype, const void* input, std::size_t count) {
  const std::uint32_t found = pick(absmax_variants())(dtype, input, count);
  return std::bit_cast<float>(found < 0x7f800000 ? found : largest_finite(dtype, input, count));
}

TensorScales tensor_scales_for(Format format, ScaleRule rule, float absmax) {
  return scales_for(PackedFormats{}, format, rule, absmax);
}

TensorScales choose_tensor_scales(Format format, ScaleRule rule, DType dtype, const void* input,
                                  std::size_t count, ParallelFor parallel_for) {
  constexpr std::size_t kPiece = 65536;
  std::atomic<float> largest = 0.0f;
  parallel_for(ceil_div(count, kPiece), 1, [&](std::size_t first, std::size_t last) {
    for (std::size_t piece = first; piece < last; ++piece) {
      const std::size_t begin = piece * kPiece, size = std::min(kPiece, count - begin);
      const void* in = static_cast<const std::byte*>(input) + begin * size_bytes(dtype);
      const float found = largest_magnitude(dtype, in, size);
      float seen = largest.load();
      while (found > seen && !largest.compare_exchange_weak(seen, found)) {
      }
    }
  });
  return tensor_scales_for(format, rule, largest.load());
}

const std::vector<Variant<QuantizeFn, ByFormat>>& quantize_variants() {
  static const auto rows = make_variants<QuantizeFn>(
      VectorTargets{}, every_format(),
      []<class V>(ByFormat key) { return quantize_variant<V>(key.format); });
  return rows;
}

std::optional<std::size_t> quantize(const QuantizeJob& job, ParallelFor parallel_for) {
  QuantizeFn* run = pick(quantize_variants(), job.format);
  if (run == nullptr) throw Error("quantize: no variant for this format");
  if (job.elements == 0) return std::nullopt;
  // The smallest position over all ranges, so that the report does not depend on the threads.
  std::atomic<std::size_t> first_bad = kAllFinite;
  std::size_t grain = job.shape == BlockShape::kSquare ? 1 : ceil_div(16384, job.block);
  // Groups of a row may share a byte: rows are shared out whole.
  const bool by_rows = job.shape == BlockShape::kGroup;
  const std::size_t together = by_rows ? job.cols / job.block : 1;
  if (by_rows) grain = ceil_div(16384, job.cols);
  parallel_for(job.blocks() / together, grain, [&](std::size_t first, std::size_t last) {
    const std::size_t bad = run(job, first * together, last * together);
    std::size_t seen = first_bad.load();
    while (bad < seen && !first_bad.compare_exchange_weak(seen, bad)) {
    }
  });
  if (first_bad == kAllFinite) return std::nullopt;
  // Square blocks are not walked in the order of the elements.
  if (job.shape == BlockShape::kSquare) return first_nonfinite_of(job);
  return first_bad;
}

}  // namespace monograph
