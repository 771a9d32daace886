#include "monograph/train/adapter_file.h"

#include <cmath>
#include <cstdint>
#include <map>
#include <set>

#include "monograph/files/atomic_file.h"
#include "monograph/safetensors/writer.h"
#include "monograph/text/json_document.h"

namespace monograph::train {
namespace {

using json::Value;

// The fields of LoraConfig of PEFT 0.21 that a plain LoRA leaves at their defaults.
constexpr const char* kNull[] = {"alora_invocation_tokens",
                                 "arrow_config",
                                 "auto_mapping",
                                 "corda_config",
                                 "eva_config",
                                 "exclude_modules",
                                 "kasa_config",
                                 "layer_replication",
                                 "layers_pattern",
                                 "layers_to_transform",
                                 "lora_ga_config",
                                 "megatron_config",
                                 "modules_to_save",
                                 "monteclora_config",
                                 "revision",
                                 "target_parameters",
                                 "trainable_token_indices",
                                 "use_bdlora",
                                 "velora_config"};
constexpr const char* kFalse[] = {"ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora",
                                  "use_qalora"};
constexpr const char* kEmpty[] = {"alpha_pattern", "loftq_config", "rank_pattern"};

Value number(double value) {
  const bool whole = value == std::floor(value) && std::abs(value) < 1e15;
  return whole ? Value::number(static_cast<std::int64_t>(value)) : Value::number(value);
}

std::string config_text(const LoraParameters& parameters, const AdapterDescription& description) {
  const TargetModules& asked = description.lora.targets;
  std::set<std::string> targets(asked.names.begin(), asked.names.end());
  if (asked.takes_all())
    for (const LoraPlace& place : parameters.places) targets.insert(place.module);
  Value names = Value::array();
  for (const std::string& target : targets) names.append(Value::string(target));
  std::map<std::string, Value> fields;
  for (const char* name : kNull) fields[name] = Value();
  for (const char* name : kFalse) fields[name] = Value::boolean(false);
  for (const char* name : kEmpty) fields[name] = Value::object();
  fields["base_model_name_or_path"] = Value::string(description.base_model);
  fields["bias"] = Value::string("none");
  fields["inference_mode"] = Value::boolean(true);
  fields["init_lora_weights"] = Value::boolean(true);
  fields["lora_alpha"] = number(description.lora.alpha);
  fields["lora_dropout"] = Value::number(description.dropout);
  fields["megatron_core"] = Value::string("megatron.core");
  fields["peft_type"] = Value::string("LORA");
  fields["qalora_group_size"] = Value::number(std::int64_t{16});
  fields["r"] = Value::number(static_cast<std::int64_t>(description.lora.rank));
  fields["target_modules"] = asked.pattern.empty() ? names : Value::string(asked.pattern);
  fields["task_type"] = Value::string("CAUSAL_LM");
  fields["use_rslora"] = Value::boolean(description.lora.rslora);
  Value object = Value::object();
  for (const auto& [name, value] : fields) object.append_member(name, value);
  return json::dump(object);
}

// As read_recorded_base reads it.
std::string base_text(const AdapterDescription& description) {
  Value base = Value::object();
  base.set("sha256", Value::string(description.base_sha256));
  base.set("weights", Value::string(description.base_packed ? "dequantized" : "original"));
  Value record = Value::object();
  record.set("schema_version", Value::number(std::int64_t{1}));
  record.set("base", std::move(base));
  return json::dump(record);
}

}  // namespace

void write_adapter(const LoraParameters& parameters, const AdapterDescription& description,
                   const std::filesystem::path& folder) {
  struct Part {
    std::string name;
    std::size_t begin;
    std::vector<std::uint64_t> shape;
  };
  std::vector<Part> parts;
  for (const LoraPlace& place : parameters.places) {
    const std::string name = "base_model.model." + place.module + ".lora_";
    parts.push_back({name + "A.weight", place.a, {place.rank, place.inputs}});
    parts.push_back({name + "B.weight", place.b, {place.outputs, place.rank}});
  }
  std::vector<safetensors::TensorSpec> specs;
  for (const Part& part : parts)
    specs.push_back({part.name, safetensors::StoredDType::kF32, part.shape});
  safetensors::Writer writer(folder / "adapter_model.safetensors",
                             safetensors::plan_file(specs, {{"format", "pt"}}));
  for (const Part& part : parts) {
    const std::size_t bytes = part.shape[0] * part.shape[1] * sizeof(float);
    writer.write(part.name, 0,
                 {reinterpret_cast<const std::uint8_t*>(&parameters.values[part.begin]), bytes});
  }
  writer.finish();
  files::write_file(folder / "adapter_config.json", config_text(parameters, description));
  files::write_file(folder / "monograph.json", base_text(description));
}

}  // namespace monograph::train
