// The variant list and the parallel driver; no intrinsics here.
#include "monograph/kernels/rms_norm/rms_norm.h"

#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/kernels/keys.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
const RmsNormKernels* rms_norm_variant(DType dtype, DType out_dtype);

namespace {

// Elements a thread takes at least: some 10 microseconds of work.
constexpr std::size_t kGrain = 32768;
// dgain is summed over so many pieces of rows at most, of so many rows at least: what the memory of
// the partial sums and the work of one thread allow. Their borders depend on the rows alone.
constexpr std::size_t kMostPieces = 64, kLeastRows = 32;

const RmsNormKernels& pick_rms_norm(DType dtype, DType out_dtype) {
  const RmsNormKernels* kernels = pick(rms_norm_variants(), dtype, out_dtype);
  if (kernels == nullptr) throw Error("rms_norm: no variant for these types");
  return *kernels;
}

std::size_t rows_of_grain(std::size_t cols) {
  return std::max<std::size_t>(kGrain / std::max<std::size_t>(cols, 1), 1);
}

}  // namespace

const std::vector<Variant<const RmsNormKernels, ByNormTypes>>& rms_norm_variants() {
  static const auto rows = [] {
    std::vector<ByNormTypes> keys;
    for (const ByDType key : every_dtype()) {
      keys.push_back({key.dtype, key.dtype});
      if (key.dtype != DType::kFloat32) keys.push_back({key.dtype, DType::kFloat32});
    }
    return make_variants<const RmsNormKernels>(VectorTargets{}, keys, []<class V>(ByNormTypes key) {
      return rms_norm_variant<V>(key.dtype, key.out_dtype);
    });
  }();
  return rows;
}

void rms_norm(const RmsNormForward& job, ParallelFor parallel_for) {
  if (job.cols == 0) return;
  const RmsNormKernels& kernels = pick_rms_norm(job.dtype, job.out_dtype);
  parallel_for(job.rows, rows_of_grain(job.cols),
               [&](std::size_t begin, std::size_t end) { kernels.forward(job, begin, end); });
}

void rms_norm_backward(const RmsNormBackward& job, ParallelFor parallel_for) {
  if (job.cols == 0) return;
  const RmsNormKernels& kernels = pick_rms_norm(job.dtype, job.out_dtype);
  if (job.dgain == nullptr) {
    parallel_for(job.rows, rows_of_grain(job.cols), [&](std::size_t begin, std::size_t end) {
      kernels.backward(job, begin, end, nullptr);
    });
    return;
  }
  const std::size_t piece = std::max(kLeastRows, (job.rows + kMostPieces - 1) / kMostPieces);
  const std::size_t pieces = (job.rows + piece - 1) / piece;
  std::vector<float> partial(pieces * job.cols);
  parallel_for(pieces, 1, [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i)
      kernels.backward(job, i * piece, std::min((i + 1) * piece, job.rows),
                       partial.data() + i * job.cols);
  });
  std::fill_n(job.dgain, job.cols, 0.f);
  for (std::size_t i = 0; i < pieces; ++i)
    for (std::size_t j = 0; j < job.cols; ++j) job.dgain[j] += partial[i * job.cols + j];
}

}  // namespace monograph
