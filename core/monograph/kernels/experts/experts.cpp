// The variant list; no intrinsics here.
#include "monograph/kernels/experts/experts.h"

#include "monograph/base/error.h"
#include "monograph/kernels/experts/kernels.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
const ExpertsKernels* experts_variant(DType dtype);

const std::vector<Variant<const ExpertsKernels, ByDType>>& experts_variants() {
  static const auto rows = make_variants<const ExpertsKernels>(
      VectorTargets{}, every_dtype(),
      []<class V>(ByDType key) { return experts_variant<V>(key.dtype); });
  return rows;
}

const ExpertsKernels& pick_experts(DType dtype) {
  const ExpertsKernels* kernels = pick(experts_variants(), dtype);
  if (kernels == nullptr) throw Error("experts: no variant for this type");
  return *kernels;
}

}  // namespace monograph
