// Steps on a model in a folder: the same bits on any number of threads, with recomputation and
// without. What the bits are is compared with Python, tests/python/native/test_native_trainer.py.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/cpu/parallel.h"
#include "monograph/files/atomic_file.h"
#include "monograph/files/tests/temporary_folder.h"
#include "monograph/safetensors/writer.h"
#include "monograph/train/base_model.h"
#include "monograph/train/lora_start.h"
#include "monograph/train/train_step.h"

namespace monograph::train {
namespace {

constexpr const char* kConfig = R"({"model_type": "qwen2", "hidden_size": 64,
  "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "vocab_size": 50, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
  "hidden_act": "silu", "tie_word_embeddings": true})";

using Shape = std::vector<std::uint64_t>;

void write_model(const std::filesystem::path& folder) {
  std::vector<safetensors::TensorSpec> specs;
  const auto add = [&](const std::string& name, const Shape& shape) {
    specs.push_back({name, safetensors::StoredDType::kBF16, shape});
  };
  add("model.embed_tokens.weight", {50, 64});
  add("model.norm.weight", {64});
  for (const char* layer : {"0", "1"}) {
    const std::string at = std::string("model.layers.") + layer + ".";
    add(at + "input_layernorm.weight", {64});
    add(at + "post_attention_layernorm.weight", {64});
    for (const char* name : {"q", "k", "v"}) {
      const std::uint64_t rows = *name == 'q' ? 64 : 32;
      add(at + "self_attn." + name + "_proj.weight", {rows, 64});
      add(at + "self_attn." + name + "_proj.bias", {rows});
    }
    add(at + "self_attn.o_proj.weight", {64, 64});
    add(at + "mlp.gate_proj.weight", {96, 64});
    add(at + "mlp.up_proj.weight", {96, 64});
    add(at + "mlp.down_proj.weight", {64, 96});
  }
  safetensors::Writer writer(folder / "model.safetensors", safetensors::plan_file(specs, {}));
  std::uint32_t word = 1;
  for (const safetensors::TensorSpec& spec : specs) {
    std::size_t size = 1;
    for (const std::uint64_t n : spec.shape) size *= n;
    std::vector<Bf16> values;
    for (std::size_t i = 0; i < size; ++i) {
      word = word * 1664525u + 1013904223u;
      const float drawn = static_cast<float>(word >> 8) * 0x1p-24f - 0.5f;
      values.push_back(from_float<Bf16>(spec.shape.size() == 1 ? 1 + drawn : 0.3f * drawn));
    }
    writer.write(spec.name, 0,
                 {reinterpret_cast<const std::uint8_t*>(values.data()), 2 * values.size()});
  }
  writer.finish();
  files::write_file(folder / "config.json", kConfig);
}

std::vector<Batch> batches(bool packs) {
  std::vector<Batch> made;
  for (std::int32_t first : {3, 11, 20}) {
    std::vector<std::vector<std::int32_t>> tokens;
    for (const std::int32_t length : {17, 5, 30}) {
      std::vector<std::int32_t>& ids = tokens.emplace_back();
      for (std::int32_t i = 0; i < length; ++i) ids.push_back((first + 7 * i) % 50);
    }
    std::vector<Document> documents;
    for (const auto& ids : tokens) documents.push_back({ids, ids});
    made.push_back(packs ? packed_batch(documents, 64, 0) : padded_batch(documents, 3, 8, 0));
  }
  return made;
}

std::vector<float> trained(const std::filesystem::path& folder, int threads, bool recompute,
                           bool packs, double dropout) {
  ThreadPool pool(threads);
  const auto each = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  const BaseModel base(folder, DType::kBFloat16);
  LoraSettings lora;
  lora.rank = 5;
  LoraParameters parameters = start_parameters(lora, base, 3);
  StepSettings settings;
  settings.recompute = recompute;
  settings.dropout = dropout;
  settings.leaves = 2;
  TrainStep step(base, parameters, settings, {each, pool.threads()});
  std::vector<float> found;
  for (int i = 0; i < 2; ++i) {
    const StepResult result = step(batches(packs), 0.01);
    found.push_back(result.loss);
    found.push_back(result.grad_norm);
  }
  for (const auto* part : {&parameters.values, &parameters.exp_avg, &parameters.exp_avg_sq})
    found.insert(found.end(), part->begin(), part->end());
  return found;
}

TEST(TrainStep, TheSameBitsOnAnyNumberOfThreads) {
  const files::TemporaryFolder folder;
  write_model(folder.path());
  for (const bool packs : {true, false})
    for (const double dropout : {0.0, 0.2}) {
      const std::vector<float> want = trained(folder.path(), 1, true, packs, dropout);
      EXPECT_GT(want[0], 1.0f);
      EXPECT_LT(want[2], want[0]);
      EXPECT_GT(want[1], 0.0f);
      for (const int threads : {2, 3, 5})
        EXPECT_EQ(trained(folder.path(), threads, threads == 3, packs, dropout), want)
            << threads << " threads";
    }
}

}  // namespace
}  // namespace monograph::train
