#include "monograph/kernels/low_rank/low_rank.h"

#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
void add_low_rank_with(const LowRankJob& job, std::size_t rows);

const std::vector<Variant<LowRankFn>>& low_rank_variants() {
  static const auto rows = make_variants<LowRankFn>(
      LoopTargets{}, []<class V>() -> LowRankFn* { return add_low_rank_with<V>; });
  return rows;
}

void add_low_rank(const LowRankJob& job, std::size_t rows) { pick(low_rank_variants())(job, rows); }

}  // namespace monograph
