#include "monograph/train/lora_start.h"

#include <cmath>
#include <optional>
#include <random>
#include <regex>
#include <set>
#include <span>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"

namespace monograph::train {
namespace {

// torch's generator of the CPU is this engine, a float32 number the lowest 24 bits of a word, and a
// range is reached by one fused multiply-add.
class Generator {
 public:
  explicit Generator(std::uint64_t seed) : engine_(static_cast<std::uint32_t>(seed)) {}

  void fill(std::span<float> values, float bound, DType dtype) {
    with_type(dtype, [&]<class T>() {
      for (float& value : values)
        value = to_float(from_float<T>(std::fma(next(), bound + bound, -bound)));
    });
  }
  void skip(std::size_t count) { engine_.discard(count); }

 private:
  float next() { return static_cast<float>(engine_() & 0xFFFFFF) * 0x1p-24f; }
  std::mt19937 engine_;
};

// PEFT would take names of an MLP, and all projections, for the experts, too.
void check_leaves_experts(const TargetModules& targets, const ModelConfig& config) {
  if (config.experts.count == 0) return;
  const std::string wanted =
      ", and LoRA on the experts of " + config.family +
      " is not built here; wanted lora_target_modules: [q_proj, k_proj, v_proj, o_proj] or some of "
      "them";
  if (targets.takes_all()) throw Error("lora_target_linear: true takes the experts" + wanted);
  if (!targets.pattern.empty())
    throw Error("lora_target_modules: " + targets.pattern + " may take the experts" + wanted);
  for (const std::string& name : targets.names)
    if (name != "q_proj" && name != "k_proj" && name != "v_proj" && name != "o_proj")
      throw Error("lora_target_modules: " + name + " may take the experts" + wanted);
}

// The projections that have LoRA, in the order of the model.
std::vector<const BaseProjection*> targets_of(const TargetModules& targets, const BaseModel& base) {
  check_leaves_experts(targets, base.config());
  check_takes_projections_alone(targets, base.layers().size());
  std::optional<std::regex> pattern;
  if (!targets.pattern.empty()) pattern = compile_pattern(targets.pattern);
  std::vector<const BaseProjection*> found;
  std::set<std::string> used;
  for (const BaseLayer& layer : base.layers())
    for (const BaseProjection* const projection : projections_of(layer)) {
      const std::string& module = projection->module;
      bool taken = targets.takes_all() || (pattern && std::regex_match(module, *pattern));
      for (const std::string& name : targets.names)
        if (ends_with_name(module, name)) {
          taken = true;
          used.insert(name);
        }
      if (taken) found.push_back(projection);
    }
  const char* const wanted =
      ", wanted q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj or down_proj";
  for (const std::string& name : targets.names)
    if (!used.contains(name))
      throw Error("lora_target_modules: no projection is called " + name + wanted);
  if (found.empty())
    throw Error("lora_target_modules: no projection is matched by " + targets.pattern + wanted);
  return found;
}

}  // namespace

LoraParameters start_parameters(const LoraSettings& settings, const BaseModel& base,
                                std::uint64_t seed) {
  LoraParameters parameters;
  Generator generator(seed);
  for (const BaseProjection* const projection : targets_of(settings.targets, base)) {
    LoraPlace place;
    place.module = projection->module;
    place.rank = settings.rank;
    place.outputs = projection->weight.packed.rows;
    place.inputs = projection->weight.packed.cols;
    const double rank = static_cast<double>(settings.rank);
    place.scaling = settings.alpha / (settings.rslora ? std::sqrt(rank) : rank);
    place.stream = parameters.places.size();
    const std::size_t a = place.rank * place.inputs, b = place.outputs * place.rank;
    place.a = parameters.values.size();
    place.b = place.a + a;
    parameters.values.resize(place.b + b, 0.0f);
    // Both layers of PEFT draw their weights when they are made; then A is drawn again.
    generator.skip(a + b);
    const double gain = std::sqrt(2.0 / (1 + 5.0));
    const double bound = std::sqrt(3.0) * (gain / std::sqrt(static_cast<double>(place.inputs)));
    generator.fill(std::span(parameters.values).subspan(place.a, a), static_cast<float>(bound),
                   base.dtype());
    parameters.places.push_back(place);
  }
  parameters.exp_avg.assign(parameters.values.size(), 0.0f);
  parameters.exp_avg_sq.assign(parameters.values.size(), 0.0f);
  return parameters;
}

}  // namespace monograph::train
