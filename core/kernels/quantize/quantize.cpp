// The variant list and the parallel driver; no intrinsics here.
#include "kernels/quantize/quantize.h"

#include <atomic>

#include "base/error.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
QuantizeFn* quantize_variant(Format format);

const std::vector<Variant<QuantizeFn>>& quantize_variants() {
  static const auto rows = make_variants<QuantizeFn>(
      VectorTargets{}, []<class V>(Format format) { return quantize_variant<V>(format); });
  return rows;
}

std::optional<std::size_t> quantize(const QuantizeJob& job, ParallelFor parallel_for) {
  QuantizeFn* run = pick(quantize_variants(), job.format);
  if (run == nullptr) throw Error("quantize: no variant for this format");
  // The smallest position over all ranges, so that the report does not depend on the threads.
  std::atomic<std::size_t> first_bad = kAllFinite;
  const std::size_t grain = ceil_div(16384, job.block);
  parallel_for(ceil_div(job.elements, job.block), grain, [&](std::size_t first, std::size_t last) {
    const std::size_t bad = run(job, first, last);
    std::size_t seen = first_bad.load();
    while (bad < seen && !first_bad.compare_exchange_weak(seen, bad)) {
    }
  });
  if (first_bad == kAllFinite) return std::nullopt;
  return first_bad;
}

}  // namespace monograph
