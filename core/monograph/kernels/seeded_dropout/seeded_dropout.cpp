// The variant list and the parallel driver; no intrinsics here.
#include "monograph/kernels/seeded_dropout/seeded_dropout.h"

#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
DropoutFn* seeded_dropout_variant(DType dtype);

const std::vector<Variant<DropoutFn, ByDType>>& seeded_dropout_variants() {
  static const auto rows = make_variants<DropoutFn>(
      VectorTargets{}, every_dtype(),
      []<class V>(ByDType key) { return seeded_dropout_variant<V>(key.dtype); });
  return rows;
}

void seeded_dropout(const DropoutProblem& problem, ParallelFor parallel_for) {
  // Elements a thread takes at least: some 10 microseconds of work.
  constexpr std::size_t kGrain = 16384;
  DropoutFn* const run = pick(seeded_dropout_variants(), problem.dtype);
  parallel_for(problem.count, kGrain,
               [&](std::size_t begin, std::size_t end) { run(problem, begin, end); });
}

}  // namespace monograph
