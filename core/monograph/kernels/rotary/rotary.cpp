// The variant list and the parallel driver; no intrinsics here.
#include "monograph/kernels/rotary/rotary.h"

#include <algorithm>

#include "monograph/base/error.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
const RotaryKernels* rotary_variant(DType dtype);

namespace {

// Elements a thread takes at least: some 10 microseconds of work.
constexpr std::size_t kGrain = 16384;
// dgain is summed over so many pieces of tokens at most, of so many tokens at least; their borders
// depend on the tokens alone.
constexpr std::size_t kMostPieces = 64, kLeastTokens = 16;

const RotaryKernels& pick_rotary(DType dtype) {
  const RotaryKernels* kernels = pick(rotary_variants(), dtype);
  if (kernels == nullptr) throw Error("rotary: no variant for this type");
  return *kernels;
}

std::size_t grain_of(const RotaryProblem& p) {
  return std::max<std::size_t>(1, kGrain / (p.heads * p.size));
}

}  // namespace

const std::vector<Variant<const RotaryKernels, ByDType>>& rotary_variants() {
  static const auto rows = make_variants<const RotaryKernels>(
      VectorTargets{}, every_dtype(),
      []<class V>(ByDType key) { return rotary_variant<V>(key.dtype); });
  return rows;
}

void rotary(const RotaryForward& job, ParallelFor parallel_for) {
  const RotaryProblem& p = job.problem;
  if (p.tokens == 0 || p.heads == 0) return;
  const RotaryKernels& kernels = pick_rotary(p.dtype);
  parallel_for(p.tokens, grain_of(p),
               [&](std::size_t begin, std::size_t end) { kernels.forward(job, begin, end); });
}

void rotary_backward(const RotaryBackward& job, ParallelFor parallel_for) {
  const RotaryProblem& p = job.problem;
  if (job.dgain != nullptr) std::fill_n(job.dgain, p.size, 0.f);
  if (p.tokens == 0 || p.heads == 0) return;
  const RotaryKernels& kernels = pick_rotary(p.dtype);
  if (job.dgain == nullptr) {
    parallel_for(p.tokens, grain_of(p), [&](std::size_t begin, std::size_t end) {
      kernels.backward(job, begin, end, nullptr);
    });
    return;
  }
  const std::size_t piece = std::max(kLeastTokens, (p.tokens + kMostPieces - 1) / kMostPieces);
  const std::size_t pieces = (p.tokens + piece - 1) / piece;
  std::vector<float> partial(pieces * p.size);
  parallel_for(pieces, 1, [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i)
      kernels.backward(job, i * piece, std::min((i + 1) * piece, p.tokens),
                       partial.data() + i * p.size);
  });
  for (std::size_t i = 0; i < pieces; ++i)
    for (std::size_t j = 0; j < p.size; ++j) job.dgain[j] += partial[i * p.size + j];
}

}  // namespace monograph
