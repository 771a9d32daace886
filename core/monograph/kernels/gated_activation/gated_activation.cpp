// The variant list and the parallel driver; no intrinsics here.
#include "monograph/kernels/gated_activation/gated_activation.h"

#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/kernels/keys.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp, amx.cpp.
template <class V>
const GatedKernels* gated_activation_variant(DType dtype, Activation activation);

namespace {

// Elements of a piece of work: some 10 microseconds.
constexpr std::size_t kPiece = 16384;

const GatedKernels& pick_gated(DType dtype, Activation activation) {
  const GatedKernels* kernels = pick(gated_activation_variants(), dtype, activation);
  if (kernels == nullptr) throw Error("gated_activation: no variant for this type");
  return *kernels;
}

// run(job, row, begin, end) over all elements; contiguous rows are one long row.
template <class Job, class Run>
void each_piece(Job job, bool contiguous, ParallelFor parallel_for, Run run) {
  if (job.rows == 0 || job.cols == 0) return;
  if (contiguous) {
    job.cols *= job.rows;
    job.rows = 1;
  }
  const std::size_t pieces = (job.cols + kPiece - 1) / kPiece;
  const std::size_t grain = std::max<std::size_t>(1, kPiece / job.cols);
  parallel_for(job.rows * pieces, grain, [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      const std::size_t row = i / pieces, begin = i % pieces * kPiece;
      run(job, row, begin, std::min(begin + kPiece, job.cols));
    }
  });
}

}  // namespace

const std::vector<Variant<const GatedKernels, ByActivation>>& gated_activation_variants() {
  static const auto rows = [] {
    std::vector<ByActivation> keys;
    for (const ByDType key : every_dtype())
      for (const Activation activation :
           {Activation::kSilu, Activation::kGeluTanh, Activation::kGelu})
        keys.push_back({key.dtype, activation});
    return make_variants<const GatedKernels>(MatrixTargets{}, keys, []<class V>(ByActivation key) {
      return gated_activation_variant<V>(key.dtype, key.activation);
    });
  }();
  return rows;
}

void gated_activation(const GatedForward& job, ParallelFor parallel_for) {
  const bool contiguous = job.gate_stride == job.cols && job.up_stride == job.cols;
  each_piece(job, contiguous, parallel_for, pick_gated(job.dtype, job.activation).forward);
}

void gated_activation_backward(const GatedBackward& job, ParallelFor parallel_for) {
  const bool contiguous =
      job.gate_stride == job.cols && job.up_stride == job.cols && job.dy_stride == job.cols;
  each_piece(job, contiguous, parallel_for, pick_gated(job.dtype, job.activation).backward);
}

}  // namespace monograph
