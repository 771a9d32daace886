// Writes a small Llama with random weights, trains LoRA on it for some steps and says what the loss
// did.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <random>
#include <vector>

#include "monograph/safetensors/writer.h"
#include "monograph/train/lora_start.h"
#include "monograph/train/train_step.h"

namespace {

using namespace monograph;
constexpr std::size_t kWidth = 32, kInner = 64, kVocabulary = 50;

void write_model(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json")
      << R"({"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "vocab_size": 50,
             "num_hidden_layers": 1, "num_attention_heads": 2, "rms_norm_eps": 1e-5,
             "tie_word_embeddings": true})";
  const std::string layer = "model.layers.0.", attention = layer + "self_attn.",
                    mlp = layer + "mlp.";
  using Shape = std::vector<std::uint64_t>;
  std::vector<safetensors::TensorSpec> specs;
  const auto add = [&](const std::string& name, const Shape& shape) {
    specs.push_back({name + ".weight", safetensors::StoredDType::kBF16, shape});
  };
  add("model.embed_tokens", {kVocabulary, kWidth});
  for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"})
    add(attention + name, {kWidth, kWidth});
  add(mlp + "gate_proj", {kInner, kWidth});
  add(mlp + "up_proj", {kInner, kWidth});
  add(mlp + "down_proj", {kWidth, kInner});
  for (const std::string& name :
       {layer + "input_layernorm", layer + "post_attention_layernorm", std::string("model.norm")})
    add(name, {kWidth});
  safetensors::Writer writer(folder / "model.safetensors", safetensors::plan_file(specs, {}));
  std::mt19937 random(1);
  for (const safetensors::TensorSpec& spec : specs) {
    std::vector<std::uint16_t> bits(safetensors::size_bytes(spec) / 2, 0x3f80);  // 1.0
    // Of both signs, up to 0.5.
    for (std::uint16_t& value : bits)
      if (spec.shape.size() == 2) value = static_cast<std::uint16_t>((random() & 0x80ff) + 0x3e00);
    writer.write(spec.name, 0,
                 {reinterpret_cast<const std::uint8_t*>(bits.data()), bits.size() * 2});
  }
  writer.finish();
}

}  // namespace

int main(int count, char** arguments) try {
  const std::filesystem::path folder = count > 1 ? arguments[1] : "tiny";
  write_model(folder);
  ThreadPool pool(2);
  const auto each = [&](std::size_t n, std::size_t grain, ParallelBody body) {
    pool.parallel_for(n, grain, body);
  };
  const train::BaseModel base(folder, DType::kBFloat16);
  train::LoraSettings lora;
  lora.rank = 4;
  lora.alpha = 8;
  train::LoraParameters parameters = train::start_parameters(lora, base, /*seed=*/1);
  train::StepSettings settings;
  settings.weight_decay = 0.01;
  train::TrainStep step(base, parameters, settings, {each, pool.threads()});

  const std::vector<std::int32_t> one = {3, 4, 5, 6, 7, 8}, two = {9, 8, 7, 6};
  const train::Document documents[] = {{one, one}, {two, two}};
  const train::Batch batch = train::packed_batch(documents, /*length=*/16, /*pad=*/0);
  const float first = step({&batch, 1}, 0.01).loss;
  float last = first;
  for (int i = 0; i < 30; ++i) last = step({&batch, 1}, 0.01).loss;
  std::printf("loss %s: %.2f, then %.2f\n", last < first / 2 ? "fell" : "stayed", first, last);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
