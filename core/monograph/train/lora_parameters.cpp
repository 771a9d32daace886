#include "monograph/train/lora_parameters.h"

#include <algorithm>

#include "monograph/adapter/factors.h"
#include "monograph/base/error.h"

namespace monograph::train {
namespace {

[[noreturn]] void refuse(const Adapter& adapter, const std::string& what) {
  throw Error(adapter.folder().string() + ": " + what);
}

void check_kind(const Adapter& adapter) {
  const AdapterConfig& config = adapter.config();
  if (config.use_dora)
    refuse(adapter, "use_dora is true, wanted LoRA: the native trainer has no DoRA");
  if (config.lora_bias) refuse(adapter, "lora_bias is true, wanted false");
  if (config.fan_in_fan_out) refuse(adapter, "fan_in_fan_out is true, wanted false");
  if (!adapter.replacements().empty())
    refuse(adapter, "modules_to_save trains " + adapter.replacements().begin()->first +
                        " whole, wanted LoRA alone");
  if (!adapter.token_rows().empty())
    refuse(adapter, "trainable_token_indices names rows of " + adapter.token_rows().begin()->first +
                        ", wanted LoRA alone");
  if (!config.target_parameters.empty())
    refuse(adapter, "target_parameters names " + config.target_parameters[0] + ", wanted none");
}

void take_factor(LoraParameters& parameters, const std::vector<float>& factor) {
  parameters.values.insert(parameters.values.end(), factor.begin(), factor.end());
}

}  // namespace

const LoraPlace* LoraParameters::find(std::string_view module) const {
  const auto found = std::find_if(places.begin(), places.end(),
                                  [&](const LoraPlace& place) { return place.module == module; });
  return found == places.end() ? nullptr : &*found;
}

std::vector<const BaseProjection*> projections_of(const BaseLayer& layer) {
  std::vector<const BaseProjection*> found = {&layer.query, &layer.key, &layer.value, &layer.out};
  if (layer.experts.count == 0) found.insert(found.end(), {&layer.gate, &layer.up, &layer.down});
  return found;
}

void check_base_of(const LoraParameters& parameters, const BaseModel& base) {
  for (const BaseLayer& layer : base.layers())
    for (const BaseProjection* const projection : projections_of(layer)) {
      if (projection->packed) continue;
      if (base.dtype() != DType::kBFloat16)
        throw Error(projection->module + " is not packed and the type of the model is " +
                    name_of(base.dtype()) + ", wanted bfloat16, or a packed base");
      if (parameters.find(projection->module) == nullptr)
        throw Error(projection->module +
                    " is not packed and has no LoRA, wanted lora_target_linear: true, or a packed "
                    "base");
    }
}

LoraParameters read_parameters(const Adapter& adapter, const BaseModel& base) {
  check_kind(adapter);
  LoraParameters parameters;
  for (const BaseLayer& layer : base.layers())
    for (const BaseProjection* const projection : projections_of(layer)) {
      const auto found = adapter.low_rank().find(projection->module);
      if (found == adapter.low_rank().end()) continue;
      const LowRank& lora = found->second;
      if (lora.embedding)
        refuse(adapter,
               projection->module + " has the factors of an embedding, wanted a projection's");
      LoraPlace place;
      place.module = projection->module;
      place.rank = lora.rank;
      place.outputs = projection->weight.packed.rows;
      place.inputs = projection->weight.packed.cols;
      place.scaling = lora.scale;
      place.stream = parameters.places.size();
      const bool fits =
          lora.has_rank() && lora.a->shape[1] == place.inputs && lora.b->shape[0] == place.outputs;
      if (!fits || lora.rank == 0)
        refuse(adapter, place.module + " has factors " + shape_in_brackets(lora.a->shape) +
                            " and " + shape_in_brackets(lora.b->shape) + ", wanted those of a [" +
                            std::to_string(place.outputs) + ", " + std::to_string(place.inputs) +
                            "] with rank " + std::to_string(lora.rank));
      const std::string key = "base_model.model." + place.module + ".lora_";
      place.a = parameters.values.size();
      take_factor(parameters, read_floats(*adapter.checkpoint().find(key + "A.weight")));
      place.b = parameters.values.size();
      take_factor(parameters, read_floats(*adapter.checkpoint().find(key + "B.weight")));
      parameters.places.push_back(place);
    }
  if (parameters.places.size() != adapter.low_rank().size() || parameters.places.empty()) {
    for (const auto& [module, lora] : adapter.low_rank())
      if (parameters.find(module) == nullptr)
        refuse(adapter, module + " has a LoRA, wanted projections of attention and MLP alone");
    refuse(adapter, "has no LoRA");
  }
  parameters.exp_avg.assign(parameters.values.size(), 0.0f);
  parameters.exp_avg_sq.assign(parameters.values.size(), 0.0f);
  return parameters;
}

}  // namespace monograph::train
