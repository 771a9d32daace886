// The variant list and the parallel driver; no intrinsics here.
#include "monograph/kernels/rms_norm_gated/rms_norm_gated.h"

#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/kernels/keys.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
const GatedNormKernels* rms_norm_gated_variant(DType dtype, Gate gate);

namespace {

// Elements a thread takes at least: some 10 microseconds of work.
constexpr std::size_t kGrain = 16384;
// As in rms_norm: dgain is summed over so many pieces of rows at most, of so many rows at least.
constexpr std::size_t kMostPieces = 64, kLeastRows = 32;

const GatedNormKernels& pick_norm(const GatedNormProblem& problem) {
  const GatedNormKernels* kernels = pick(rms_norm_gated_variants(), problem.dtype, problem.gate);
  if (kernels == nullptr) throw Error("rms_norm_gated: no variant for these types");
  return *kernels;
}

std::size_t rows_of_grain(std::size_t cols) { return std::max<std::size_t>(kGrain / cols, 1); }

}  // namespace

const std::vector<Variant<const GatedNormKernels, ByGate>>& rms_norm_gated_variants() {
  static const auto rows = [] {
    std::vector<ByGate> keys;
    for (const ByDType key : every_dtype())
      for (const Gate gate : {Gate::kSilu, Gate::kSigmoid}) keys.push_back({key.dtype, gate});
    return make_variants<const GatedNormKernels>(VectorTargets{}, keys, []<class V>(ByGate key) {
      return rms_norm_gated_variant<V>(key.dtype, key.gate);
    });
  }();
  return rows;
}

void rms_norm_gated(const GatedNormForward& job, ParallelFor parallel_for) {
  const GatedNormProblem& problem = job.problem;
  if (problem.cols == 0) return;
  const GatedNormKernels& kernels = pick_norm(problem);
  parallel_for(problem.rows, rows_of_grain(problem.cols),
               [&](std::size_t begin, std::size_t end) { kernels.forward(job, begin, end); });
}

void rms_norm_gated_backward(const GatedNormBackward& job, ParallelFor parallel_for) {
  const GatedNormProblem& problem = job.problem;
  if (problem.cols == 0) return;
  const GatedNormKernels& kernels = pick_norm(problem);
  const std::size_t piece = std::max(kLeastRows, (problem.rows + kMostPieces - 1) / kMostPieces);
  const std::size_t pieces = (problem.rows + piece - 1) / piece;
  std::vector<float> partial(pieces * problem.cols);
  const std::size_t grain = std::max<std::size_t>(1, rows_of_grain(problem.cols) / piece);
  parallel_for(pieces, grain, [&](std::size_t first, std::size_t last) {
    std::vector<float> scratch(2 * problem.cols);
    for (std::size_t i = first; i < last; ++i)
      kernels.backward(job, i * piece, std::min((i + 1) * piece, problem.rows),
                       partial.data() + i * problem.cols, scratch.data());
  });
  if (job.dgain == nullptr) return;
  std::fill_n(job.dgain, problem.cols, 0.f);
  for (std::size_t i = 0; i < pieces; ++i)
    for (std::size_t j = 0; j < problem.cols; ++j) job.dgain[j] += partial[i * problem.cols + j];
}

}  // namespace monograph
