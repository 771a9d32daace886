#include "monograph/train/lora_start.h"

#include <algorithm>
#include <cmath>
#include <random>
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

bool is_target(const std::string& module, const LoraSettings& settings,
               std::set<std::string>& found) {
  const std::string leaf = module.substr(module.rfind('.') + 1);
  if (settings.targets.empty()) return true;
  const bool target =
      std::find(settings.targets.begin(), settings.targets.end(), leaf) != settings.targets.end();
  if (target) found.insert(leaf);
  return target;
}

}  // namespace

LoraParameters start_parameters(const LoraSettings& settings, const BaseModel& base,
                                std::uint64_t seed) {
  LoraParameters parameters;
  Generator generator(seed);
  std::set<std::string> found;
  for (const BaseLayer& layer : base.layers())
    for (const BaseProjection* const projection : projections_of(layer)) {
      if (!is_target(projection->module, settings, found)) continue;
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
  for (const std::string& target : settings.targets)
    if (!found.contains(target))
      throw Error("lora_target_modules: no projection is called " + target +
                  ", wanted q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj or down_proj");
  parameters.exp_avg.assign(parameters.values.size(), 0.0f);
  parameters.exp_avg_sq.assign(parameters.values.size(), 0.0f);
  return parameters;
}

}  // namespace monograph::train
