// A folder with a small model of random weights, for tests that need no Python to make one.
#pragma once

#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "monograph/files/tests/temporary_folder.h"
#include "monograph/safetensors/writer.h"
#include "monograph/train/lora_start.h"

namespace monograph::train {

inline constexpr std::size_t kTinyVocabulary = 61;

class TinyModel {
 public:
  // `more` are further keys of config.json: "model_type" at least.
  explicit TinyModel(const std::string& more, bool head_norms = false, bool branch_norms = false) {
    std::ofstream(folder_.path() / "config.json")
        << R"({"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16,
               "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "rope_theta": 1e4,
               "rms_norm_eps": 1e-5, "max_position_embeddings": 700, )"
        << more << "}";
    add("model.embed_tokens.weight", {kTinyVocabulary, 48});
    for (const char* const layer : {"model.layers.0.", "model.layers.1."}) {
      const std::string at = layer, attention = at + "self_attn.";
      add(at + "input_layernorm.weight", {48});
      add(at + "post_attention_layernorm.weight", {48});
      if (branch_norms) {
        add(at + "pre_feedforward_layernorm.weight", {48});
        add(at + "post_feedforward_layernorm.weight", {48});
      }
      add(attention + "q_proj.weight", {64, 48});
      add(attention + "k_proj.weight", {32, 48});
      add(attention + "v_proj.weight", {32, 48});
      add(attention + "o_proj.weight", {48, 64});
      if (head_norms) {
        add(attention + "q_norm.weight", {16});
        add(attention + "k_norm.weight", {16});
      }
      add(at + "mlp.gate_proj.weight", {80, 48});
      add(at + "mlp.up_proj.weight", {80, 48});
      add(at + "mlp.down_proj.weight", {48, 80});
    }
    add("model.norm.weight", {48});
    add("lm_head.weight", {kTinyVocabulary, 48});
    write();
  }

  const std::filesystem::path& folder() const { return folder_.path(); }

  // LoRA on every projection, B not zero.
  static LoraParameters adapter(const BaseModel& base) {
    LoraSettings settings;
    settings.rank = 5;
    LoraParameters parameters = start_parameters(settings, base, 3);
    std::mt19937 engine(4);
    for (const LoraPlace& place : parameters.places)
      for (std::size_t i = 0; i < place.outputs * place.rank; ++i)
        parameters.values[place.b + i] = number(engine) * 0.1f;
    return parameters;
  }

  static std::vector<std::int64_t> ids(std::size_t count) {
    std::mt19937 engine(5);
    std::vector<std::int64_t> found;
    for (std::size_t i = 0; i < count; ++i)
      found.push_back(static_cast<std::int64_t>(engine() % kTinyVocabulary));
    return found;
  }

 private:
  // Between -1 and 1.
  static float number(std::mt19937& engine) {
    return static_cast<float>(static_cast<double>(engine()) * 0x1p-31 - 1);
  }

  void add(const std::string& name, const std::vector<std::uint64_t>& shape) {
    specs_.push_back({name, safetensors::StoredDType::kF32, shape});
    const bool gain = shape.size() == 1;
    const std::size_t count = shape[0] * (gain ? 1 : shape[1]);
    // Activations keep their size; those of the embedding and of the head stand apart.
    const float size = gain ? 0.1f : name.find("layers") == std::string::npos ? 1.0f : 0.2f;
    std::vector<float>& values = values_.emplace_back();
    for (std::size_t i = 0; i < count; ++i)
      values.push_back((gain ? 1.0f : 0.0f) + size * number(engine_));
  }

  void write() {
    safetensors::Writer writer(folder_.path() / "model.safetensors",
                               safetensors::plan_file(specs_, {{"format", "pt"}}));
    for (std::size_t i = 0; i < specs_.size(); ++i)
      writer.write(specs_[i].name, 0,
                   {reinterpret_cast<const std::uint8_t*>(values_[i].data()),
                    values_[i].size() * sizeof(float)});
    writer.finish();
  }

  files::TemporaryFolder folder_;
  std::mt19937 engine_{1};
  std::vector<safetensors::TensorSpec> specs_;
  std::vector<std::vector<float>> values_;
};

}  // namespace monograph::train
