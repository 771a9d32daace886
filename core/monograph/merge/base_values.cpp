#include "monograph/merge/base_values.h"

#include "monograph/hash/sha256.h"
#include "monograph/merge/panels.h"
#include "monograph/text/json_document.h"

namespace monograph {

std::string base_values_sha256(const MergePlan& plan, ParallelFor parallel_for) {
  Sha256 all;
  for (const MergedWeight& weight : plan.weights) {
    if (!weight.base_as || weight.experts != 0) continue;
    MergedWeight unchanged;
    unchanged.name = weight.name;
    unchanged.shape = weight.shape;
    unchanged.base = weight.base;
    unchanged.base_as = weight.base_as;
    const MergedPanels panels(unchanged, {}, parallel_for);
    Sha256 one;
    one.add(panels.packed_base()->values());
    all.add(json::quote(weight.name) + " " + one.hex() + "\n");
  }
  return all.hex();
}

}  // namespace monograph
