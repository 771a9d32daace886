// Stacks of experts in names of our own: the endings of compressed-tensors behind the name of a 3-D
// parameter. What it writes is written by compressed-tensors' row, for Stack::kOwn.
// And integers whose columns are sorted by group, which compressed-tensors has no name for: its
// tensors, but X.weight for X.weight_packed, and X.weight_columns. A loader that does not know them
// finds a weight of another shape. convert writes them (convert/turn_words.h).
#include <array>

#include "monograph/quant_methods/group_layouts.h"
#include "monograph/quant_methods/quant_method.h"
#include "monograph/quant_methods/shared_layouts.h"

namespace monograph {
namespace {

using safetensors::StoredDType;

constexpr std::array kStored = {
    StoredForm{"int4",
               ".weight",
               ".weight",
               {{{".weight_scale", "scale", true},
                 {".weight_shape", "shape", true},
                 {".weight_columns", "columns"},
                 {".weight_zero_point", "zero_point"}}},
               [](const Candidate& found) { return found.values_are(StoredDType::kI32); },
               [](const Candidate& found) {
                 if (found.part("columns") == nullptr) found.fail("there is no columns");
                 describe_packed_integers(found);
               }},
    StoredForm{"nvfp4",
               "_packed",
               "",
               {{{"_scale", "scale", true}, {"_global_scale", "global_scale", true}}},
               [](const Candidate& found) {
                 return found.is_stack() && found.values_are(StoredDType::kU8) &&
                        found.dtype_of("scale") == StoredDType::kF8E4M3;
               },
               [](const Candidate& found) { describe_nvfp4(found, Format::kNvfp4Divide); }},
    StoredForm{"mxfp4",
               "_packed",
               "",
               {{{"_scale", "scale", true}}},
               [](const Candidate& found) {
                 return found.is_stack() && found.values_are(StoredDType::kU8) &&
                        found.scale_is_e8m0();
               },
               describe_mxfp4},
    StoredForm{"mxfp8",
               "",
               "",
               {{{"_scale", "scale", true}}},
               [](const Candidate& found) {
                 return found.is_stack() && found.values_are(StoredDType::kF8E4M3) &&
                        found.scale_is_e8m0();
               },
               describe_fp8},
};

}  // namespace

namespace producers {

const QuantMethod& monograph_stacks() {
  static constexpr QuantMethod kMethod = {.name = "Monograph", .stored = kStored};
  return kMethod;
}

}  // namespace producers
}  // namespace monograph
