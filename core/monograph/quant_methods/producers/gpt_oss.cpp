// gpt-oss of OpenAI: P_blocks [experts, rows, blocks, 16], P_scales; experts alone.
#include <array>

#include "monograph/quant_methods/quant_method.h"

namespace monograph {
namespace {

using safetensors::StoredDType;

using Shape = std::vector<std::uint64_t>;

// blocks [E, rows, groups, 16] and scales [E, rows, groups].
void describe_gpt_oss(const Candidate& found) {
  const Shape& values = found.shape_of("values");
  if (values.size() < 3 || values.back() != 16) {
    found.fail("blocks must have the shape [..., rows, groups, 16]");
  }
  Shape scales(values.begin(), values.end() - 1);
  found.want_shape("scale", scales);
  Shape shape(scales.begin(), scales.end() - 1);
  shape.push_back(scales.back() * 32);
  found.set_shape(std::move(shape), {1, 32});
  found.bind(Format::kMxfp4, {"scale"});
}

constexpr std::array kStored = {
    StoredForm{"mxfp4",
               "_blocks",
               "",
               {{{"_scales", "scale", true}}},
               [](const Candidate& found) {
                 return found.values_are(StoredDType::kU8) && found.scale_is_e8m0();
               },
               describe_gpt_oss},
    StoredForm{"mxfp4",
               ".blocks",
               "",
               {{{".scales", "scale", true}}},
               [](const Candidate& found) {
                 return found.values_are(StoredDType::kU8) && found.scale_is_e8m0();
               },
               describe_gpt_oss},
};

constexpr std::array kWritten = {WrittenForm{.name = "mxfp4",
                                             .format = Format::kMxfp4,
                                             .values = ".weight_blocks",
                                             .scales = ".weight_scales",
                                             .stack = Stack::kGptOss}};

json::Value config_of(const ConfigRequest&) {
  return json::parse(R"({"quant_method": "mxfp4", "modules_to_not_convert":
                         ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                          "model.embed_tokens", "lm_head"]})",
                     "gpt-oss");
}

}  // namespace

namespace producers {

const QuantMethod& gpt_oss() {
  static constexpr QuantMethod kMethod = {
      .name = "gpt-oss", .stored = kStored, .written = kWritten, .config = config_of};
  return kMethod;
}

}  // namespace producers
}  // namespace monograph
