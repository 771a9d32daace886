#include "monograph/kernels/low_rank/low_rank.h"

#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
void add_low_rank_with(const LowRankJob& job, std::size_t rows);

namespace {

template <class... Vs>
std::vector<Variant<LowRankFn>> rows_of(TargetList<Vs...>) {
  return {Variant<LowRankFn>{Format::kPlain, isa_of<Vs>, add_low_rank_with<Vs>}...};
}

}  // namespace

const std::vector<Variant<LowRankFn>>& low_rank_variants() {
  static const auto rows = rows_of(VectorTargets{});
  return rows;
}

void add_low_rank(const LowRankJob& job, std::size_t rows) {
  pick(low_rank_variants(), Format::kPlain)(job, rows);
}

}  // namespace monograph
