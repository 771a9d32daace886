#include "monograph/train/rope_config.h"

namespace monograph::train {
namespace {

RopeScaling read_scaling(const json::Value& object, const std::string& source,
                         std::optional<double> theta) {
  ConfigKeys keys(object, source);
  RopeScaling rope;
  rope.theta = keys.positive("rope_theta", theta);
  const json::Value* kind = keys.find("rope_type");
  if (const json::Value* older = keys.find("type"); kind == nullptr) kind = older;
  const std::string name = kind == nullptr ? "default" : ConfigKeys::shown(*kind);
  keys.must_be("partial_rotary_factor", "1.0");
  if (name == "linear" || name == "llama3") rope.factor = keys.positive("factor");
  if (name == "linear") {
    rope.kind = RopeKind::kLinear;
  } else if (name == "llama3") {
    rope.kind = RopeKind::kLlama3;
    rope.low_frequency = keys.number("low_freq_factor");
    rope.high_frequency = keys.number("high_freq_factor");
    rope.original_positions = keys.number("original_max_position_embeddings");
  } else if (name != "default") {
    keys.fail("rope_type", kind, "default, linear or llama3");
  }
  keys.finish({});
  return rope;
}

}  // namespace

RopeScaling read_rope(ConfigKeys& keys, const std::string& source, std::optional<double> theta) {
  if (const json::Value* parameters = keys.find("rope_parameters")) {
    keys.must_be("rope_scaling", "null");
    return read_scaling(*parameters, source + ": rope_parameters", {});
  }
  const double found = keys.positive("rope_theta", theta);
  if (const json::Value* scaling = keys.find("rope_scaling"))
    return read_scaling(*scaling, source + ": rope_scaling", found);
  RopeScaling rope;
  rope.theta = found;
  return rope;
}

RopeOfLayers read_rope_of_layers(ConfigKeys& keys, const std::string& source) {
  constexpr double kFullTheta = 1e6, kSlidingTheta = 1e4;  // of the class
  RopeOfLayers ropes;
  const json::Value* const parameters = keys.find("rope_parameters");
  if (parameters == nullptr) {
    // transformers does not read the older `type` of this class, and trains without the scaling.
    if (const json::Value* const scaling = keys.find("rope_scaling"))
      if (scaling->find("type") != nullptr && scaling->find("rope_type") == nullptr)
        keys.fail("rope_scaling", scaling,
                  "rope_type in it, for transformers passes over type here");
    ropes.full = read_rope(keys, source, kFullTheta);
    ropes.sliding.theta = keys.positive("rope_local_base_freq", kSlidingTheta);
    return ropes;
  }
  keys.must_be("rope_scaling", "null");
  const std::string at = source + ": rope_parameters";
  ConfigKeys kinds(*parameters, at);
  const auto read = [&](const char* name, double theta) {
    RopeScaling rope;
    rope.theta = theta;
    const json::Value* const found = kinds.find(name);
    return found == nullptr ? rope : read_scaling(*found, at + "." + name, theta);
  };
  ropes.full = read("full_attention", kFullTheta);
  ropes.sliding = read("sliding_attention", kSlidingTheta);
  kinds.finish({});
  return ropes;
}

}  // namespace monograph::train
