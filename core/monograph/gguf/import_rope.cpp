#include "monograph/gguf/import_rope.h"

#include <algorithm>
#include <cmath>

#include "monograph/gguf/model_config.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using json::Value;
using text::in_quotes;

// The value that llama.cpp takes where a file has none.
constexpr double kTheta = 10000;

// The file has what each frequency is divided by, config.json what that follows from. Of Llama's
// own settings the ones that give these numbers; none else is guessed.
Value llama3(const ArchitectureKeys& keys, const TensorInfo& info, double theta,
             std::uint64_t head_dim) {
  const std::vector<float> found = keys.floats(info, head_dim / 2);
  ModelConfig model;
  model.head_dim = head_dim;
  model.rope.scaling = RopeScaling::kLlama3;
  model.rope.theta = theta;
  model.rope.factor = shortest(*std::max_element(found.begin(), found.end()));
  model.rope.low_freq_factor = 1;
  model.rope.high_freq_factor = 4;
  const PairView* original = keys.find("rope.scaling.original_context_length");
  // Below 1 it would be no stretching; 0 would make every number equal to 0.
  const bool stretches = model.rope.factor >= 1 && std::isfinite(model.rope.factor);
  for (std::uint64_t context = 16; stretches && context <= 1048576; context *= 2) {
    model.rope.original_context =
        original == nullptr ? context : keys.count("rope.scaling.original_context_length");
    const std::vector<float> wanted = rope_factors(model);
    // Producers compute them in float32.
    const auto near = [](float a, float b) { return std::fabs(a - b) <= 1e-4f * std::fabs(b); };
    if (!std::equal(found.begin(), found.end(), wanted.begin(), near)) continue;
    Value value;
    value.set("rope_type", Value::string("llama3"));
    value.set("factor", Value::number(model.rope.factor));
    value.set("low_freq_factor", Value::number(1.0));
    value.set("high_freq_factor", Value::number(4.0));
    value.set("original_max_position_embeddings", whole(model.rope.original_context));
    return value;
  }
  keys.fail(
      "rope_freqs.weight: its numbers are not those of a llama3 scaling with low_freq_factor 1 "
      "and high_freq_factor 4");
}

Value list_of(const std::vector<float>& numbers) {
  Value list = Value::array();
  for (const float number : numbers) list.append(Value::number(shortest(number)));
  return list;
}

}  // namespace

void add_rope(Value& config, const ArchitectureKeys& keys, std::uint64_t head_dim) {
  const double theta = keys.number("rope.freq_base", kTheta);
  config.set("rope_theta", Value::number(theta));
  const PairView* type = keys.find("rope.scaling.type");
  // llama.cpp takes a file without a type for linear, with the factor 1 where there is none.
  const PairView* factor = keys.find("rope.scaling.factor");
  const bool linear = factor != nullptr && factor->number() != 0 && factor->number() != 1;
  const std::string_view kind = type != nullptr ? type->text().value_or("")
                                : linear        ? "linear"
                                                : "none";
  const TensorInfo* factors = keys.header().find_tensor("rope_freqs.weight");
  const bool gpt_oss = keys.header().architecture() == "gpt-oss";
  Value scaling;
  if (factors != nullptr) {
    if (kind != "none")
      keys.fail("rope_freqs.weight beside a rope.scaling.type " + in_quotes(kind));
    scaling = llama3(keys, *factors, theta, head_dim);
  } else if (kind == "linear" || kind == "yarn") {
    scaling.set("rope_type", Value::string(kind));
    scaling.set("factor", Value::number(keys.number("rope.scaling.factor")));
    if (kind == "yarn") {
      scaling.set("original_max_position_embeddings",
                  whole(keys.count("rope.scaling.original_context_length")));
    }
    // The numbers of OpenAI's code, where the borders of the ramp are not rounded as others do.
    if (kind == "yarn" && gpt_oss) {
      scaling.set("beta_fast", Value::number(keys.number("rope.scaling.yarn_beta_fast", 32)));
      scaling.set("beta_slow", Value::number(keys.number("rope.scaling.yarn_beta_slow", 1)));
      scaling.set("truncate", Value::boolean(false));
    }
  } else if (kind != "none") {
    keys.fail(keys.key_of("rope.scaling.type") + " is " + in_quotes(kind) +
              ", known are none, linear, yarn");
  } else if (gpt_oss) {  // without a word transformers takes yarn
    scaling.set("rope_type", Value::string("default"));
  }
  config.set("rope_scaling", std::move(scaling));
}

void add_phi_rope(Value& config, const ArchitectureKeys& keys, std::uint64_t head_dim) {
  config.set("rope_theta", Value::number(keys.number("rope.freq_base", kTheta)));
  const std::uint64_t turned = keys.count("rope.dimension_count", head_dim);
  if (turned > head_dim || turned % 2 != 0) {
    keys.fail(keys.key_of("rope.dimension_count") + " is " + std::to_string(turned) +
              ", of a head of " + std::to_string(head_dim));
  }
  config.set("partial_rotary_factor",
             Value::number(static_cast<double>(turned) / static_cast<double>(head_dim)));
  const std::uint64_t context = keys.count("context_length");
  config.set("original_max_position_embeddings",
             whole(keys.count("rope.scaling.original_context_length", context)));
  const PairView* type = keys.find("rope.scaling.type");
  const std::string_view kind = type == nullptr ? "none" : type->text().value_or("");
  if (kind != "none" && kind != "longrope") {
    keys.fail(keys.key_of("rope.scaling.type") + " is " + in_quotes(kind) +
              ", known are none, longrope");
  }
  const PairView* factor = keys.find("rope.scaling.factor");
  if (keys.header().find_tensor("rope_freqs.weight") != nullptr ||
      (factor != nullptr && factor->number() != 1)) {
    keys.fail("rope_freqs.weight or " + keys.key_of("rope.scaling.factor") +
              ", which transformers' phi3 has no setting for");
  }
  const TensorInfo* longer = keys.header().find_tensor("rope_factors_long.weight");
  const TensorInfo* shorter = keys.header().find_tensor("rope_factors_short.weight");
  if ((longer == nullptr) != (shorter == nullptr)) {
    keys.fail("wanted both rope_factors_long.weight and rope_factors_short.weight, or none");
  }
  Value scaling;
  if (longer != nullptr) {
    scaling.set("rope_type", Value::string("longrope"));
    scaling.set("long_factor", list_of(keys.floats(*longer, turned / 2)));
    scaling.set("short_factor", list_of(keys.floats(*shorter, turned / 2)));
    if (keys.find("rope.scaling.attn_factor") != nullptr) {
      scaling.set("attention_factor", Value::number(keys.number("rope.scaling.attn_factor")));
    }
  } else if (keys.find("rope.scaling.attn_factor") != nullptr &&
             keys.find("rope.scaling.attn_factor")->number() != 1) {
    keys.fail(keys.key_of("rope.scaling.attn_factor") + " without rope_factors_long.weight");
  }
  config.set("rope_scaling", std::move(scaling));
}

}  // namespace monograph::gguf
