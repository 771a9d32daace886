#include "monograph/serving/form.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/serving/layers.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using safetensors::TensorSpec;
using text::in_quotes;

DType type_of(const KeyedTensor& tensor) { return *float_type(tensor.tensor.entry->dtype); }

// Rounded once; the product of a float and the scale is exact or close to it in a double.
float scaled(float value, double scale) {
  return static_cast<float>(static_cast<double>(value) * scale);
}

bool is_exact(DType type, float value, double scale) {
  const double product = static_cast<double>(value) * scale;
  return with_type(type, [&]<class T>() {
    return static_cast<double>(to_float(from_float<T>(static_cast<float>(product)))) == product;
  });
}

std::vector<std::uint8_t> stored_bytes(const std::vector<float>& values, DType type) {
  std::vector<std::uint8_t> bytes(values.size() * size_bytes(type));
  with_type(type, [&]<class T>() {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const T value = from_float<T>(values[i]);
      std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
  });
  return bytes;
}

std::string_view leaf_of(std::string_view module) {
  return module.substr(module.rfind('.') + 1);  // npos + 1 is 0
}

}  // namespace

std::string ServedPair::a_name() const {
  return std::string(kAdapterPrefix) + module +
         (embedding ? ".lora_embedding_A" : ".lora_A.weight");
}

std::string ServedPair::b_name() const {
  return std::string(kAdapterPrefix) + module +
         (embedding ? ".lora_embedding_B" : ".lora_B.weight");
}

void ServingForm::fail(const std::string& key, const std::string& what) const {
  throw Error(check_.config_path + ": " + in_quotes(key) + ": " + what);
}

ServingForm::ServingForm(const ServingCheck& check) : check_(check) {
  refuse(broken_rules(check_));
  config_ = parse_adapter_config(json::dump(*check_.config), check_.config_path);
  tensors_ = collect_tensors(*check_.adapter);
  refuse_other_tensors();
  placement_ = place_factors(tensors_, *check_.base, &config_);
  for (const PlacedFactors& placed : placement_.placed) rank_ = std::max(rank_, placed.rank);
  for (const PlacedFactors& placed : placement_.placed) add_placed(placed);
  fill_groups();
  std::sort(pairs_.begin(), pairs_.end(),
            [](const ServedPair& a, const ServedPair& b) { return a.module < b.module; });
  const auto twice = std::adjacent_find(
      pairs_.begin(), pairs_.end(),
      [](const ServedPair& a, const ServedPair& b) { return a.module == b.module; });
  if (twice != pairs_.end()) fail(twice->module, "has LoRA of its own and in a stack of experts");
  for (ServedPair& pair : pairs_) choose_types(pair);
}

void ServingForm::refuse(const std::vector<ServingFinding>& findings) const {
  for (const ServingFinding& finding : findings) {
    if (!finding.convertible) fail(finding.key, finding.what);
  }
}

// For PEFT nothing of it is a finding.
void ServingForm::refuse_other_tensors() const {
  ServingCheck as_server = check_;
  as_server.server = Server::kVllm;
  as_server.max_rank = kMaxLoraRank;
  for (const KeyedTensor& tensor : tensors_.all) {
    const TensorRole role = tensor.key.role;
    if (role == TensorRole::kA || role == TensorRole::kB) continue;
    if (role == TensorRole::kBaseLayer && check_.server != Server::kPeft) continue;
    if (role == TensorRole::kBaseLayer) {
      for (const ServingFinding& finding : broken_rules(as_server)) {
        if (finding.rule == "base-layer") fail(finding.key, finding.what);
      }
      continue;
    }
    fail(tensor.name(), "is more than low-rank factors; PEFT applies the adapter as it is");
  }
}

void ServingForm::add_placed(const PlacedFactors& placed) {
  const double scale = config_.scale_of(placed.name);
  if (placed.experts != 0 && check_.server != Server::kPeft) {
    return add_single_experts(placed, scale);
  }
  ServedPair pair;
  pair.module = check_.server == Server::kPeft ? placed.factors->module : placed.matrix.stored;
  pair.embedding = placed.factors->embedding;
  pair.outputs = placed.outputs();
  pair.inputs = placed.inputs();
  pair.source = &placed;
  pair.scale = scale;
  pair.stacked = placed.experts;
  if (placed.experts != 0) {
    target_parameters_.insert(std::string(leaf_of(placed.module)) + "." + placed.parameter);
  }
  pairs_.push_back(std::move(pair));
}

void ServingForm::add_single_experts(const PlacedFactors& placed, double scale) {
  for (std::uint64_t expert = 0; expert < placed.experts; ++expert) {
    for (const ExpertPart& part : parts_of(*check_.base, placed)) {
      const std::optional<std::string> module =
          single_expert(*check_.base, placed, expert, part, check_.server);
      if (!module) fail(placed.factors->a->name(), "its experts have no modules of their own");
      ServedPair pair;
      pair.module = *module;
      pair.outputs = part.rows;
      pair.inputs = placed.inputs();
      pair.source = &placed;
      pair.scale = scale;
      pair.expert = expert;
      pair.first_row = part.first_row;
      pair.row_step = part.row_step;
      pairs_.push_back(std::move(pair));
    }
  }
  if (check_.server == Server::kVllm && wants_mixed_format(*check_.base) && notes_.empty()) {
    notes_.emplace_back(
        "vLLM reads experts of this model one by one only with --enable-mixed-moe-lora-format");
  }
}

void ServingForm::fill_groups() {
  std::set<std::string> modules;
  for (const ServedPair& pair : pairs_) modules.insert(pair.module);
  for (std::size_t i = 0; i < pairs_.size(); ++i) {  // grows: what is added may ask on
    for (const std::string& other : required_with(*check_.base, check_.server, pairs_[i].module)) {
      if (!modules.insert(other).second) continue;
      const BaseMatrix matrix = *check_.base->find(other);
      if (matrix.shape[0] == 0 || matrix.shape[1] == 0) {
        fail(other, "the base has shape " + shape_in_brackets(matrix.shape) +
                        " there, wanted no dimension of 0");
      }
      ServedPair pair;
      pair.module = other;
      pair.outputs = matrix.shape[0];
      pair.inputs = matrix.shape[1];
      pairs_.push_back(std::move(pair));
      ++zeros_;
    }
  }
}

void ServingForm::choose_types(ServedPair& pair) {
  if (pair.source == nullptr) {
    pair.a_type = pair.b_type = type_of(*placement_.placed.front().factors->a);
    return;
  }
  const Factors& factors = *pair.source->factors;
  pair.a_type = type_of(pair.source->swapped ? *factors.b : *factors.a);
  pair.b_type = type_of(pair.source->swapped ? *factors.a : *factors.b);
  bool exact = true;
  const std::uint64_t last = std::max<std::uint64_t>(pair.stacked, 1);
  for (std::uint64_t expert = pair.expert; expert < pair.expert + last; ++expert) {
    const std::vector<float> values = pair.source->left(expert);
    for (const float value : values) {
      exact = exact && is_exact(pair.b_type, value, pair.scale);
      if (!std::isfinite(scaled(value, pair.scale))) {
        fail(factors.b->name(), "times its scale is more than fp32 holds");
      }
    }
  }
  if (exact) return;
  pair.b_type = DType::kFloat32;
  ++rounded_;
}

std::vector<float> ServingForm::right(const ServedPair& pair) const {
  const std::uint64_t experts = std::max<std::uint64_t>(pair.stacked, 1);
  std::vector<float> out(experts * rank_ * pair.inputs);
  if (pair.source == nullptr) return out;
  for (std::uint64_t expert = 0; expert < experts; ++expert) {
    const std::vector<float> values = pair.source->right(pair.expert + expert);
    std::copy(values.begin(), values.end(),
              out.begin() + static_cast<std::ptrdiff_t>(expert * rank_ * pair.inputs));
  }
  return out;
}

std::vector<float> ServingForm::left(const ServedPair& pair) const {
  const std::uint64_t experts = std::max<std::uint64_t>(pair.stacked, 1);
  std::vector<float> out(pair.outputs * rank_ * experts);
  if (pair.source == nullptr) return out;
  const std::uint64_t rank = pair.source->rank;
  for (std::uint64_t expert = 0; expert < experts; ++expert) {
    const std::vector<float> values = pair.source->left(pair.expert + expert);
    for (std::uint64_t row = 0; row < pair.outputs; ++row) {
      for (std::uint64_t j = 0; j < rank; ++j) {
        out[row * rank_ * experts + j * experts + expert] =
            scaled(values[(pair.first_row + row * pair.row_step) * rank + j], pair.scale);
      }
    }
  }
  return out;
}

std::vector<TensorSpec> ServingForm::specs() const {
  std::vector<TensorSpec> specs;
  for (const ServedPair& pair : pairs_) {
    const std::uint64_t rank = rank_ * std::max<std::uint64_t>(pair.stacked, 1);
    specs.push_back({pair.a_name(), stored(pair.a_type), {rank, pair.inputs}});
    specs.push_back({pair.b_name(), stored(pair.b_type), {pair.outputs, rank}});
  }
  return specs;
}

void ServingForm::write(safetensors::Writer& writer) const {
  for (const ServedPair& pair : pairs_) {
    writer.write(pair.a_name(), 0, stored_bytes(right(pair), pair.a_type));
    writer.write(pair.b_name(), 0, stored_bytes(left(pair), pair.b_type));
  }
}

std::vector<std::string> ServingForm::target_modules() const {
  std::set<std::string> names;
  for (const ServedPair& pair : pairs_) {
    if (pair.stacked != 0) continue;
    // PEFT would add a LoRA, of random A and zero B, to each module of the same name.
    names.insert(check_.server == Server::kPeft ? pair.module : std::string(leaf_of(pair.module)));
  }
  return {names.begin(), names.end()};
}

json::Value ServingForm::config() const {
  json::Value out = json::Value::object();
  for (const char* key : {"auto_mapping", "base_model_name_or_path", "peft_type", "peft_version",
                          "revision", "task_type", "fan_in_fan_out"}) {
    if (const json::Value* value = check_.config->find(key)) out.set(key, *value);
  }
  const auto rank = static_cast<std::int64_t>(rank_);
  out.set("bias", json::Value::string("none"));
  out.set("inference_mode", json::Value::boolean(true));
  out.set("init_lora_weights", json::Value::boolean(true));
  out.set("lora_alpha", json::Value::number(rank));
  out.set("lora_dropout", json::Value::number(0.0));
  out.set("modules_to_save", json::Value());
  out.set("r", json::Value::number(rank));
  out.set("rank_pattern", json::Value::object());
  out.set("alpha_pattern", json::Value::object());
  json::Value& targets = out.set("target_modules", json::Value::array());
  for (const std::string& name : target_modules()) targets.append(json::Value::string(name));
  if (!target_parameters_.empty()) {
    json::Value& parameters = out.set("target_parameters", json::Value::array());
    for (const std::string& name : target_parameters_) {
      parameters.append(json::Value::string(name));
    }
  }
  out.set("use_dora", json::Value::boolean(false));
  out.set("use_rslora", json::Value::boolean(false));
  return out;
}

}  // namespace monograph
