// A base and adapters of a few tensors in a temporary folder, merged in memory.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "monograph/files/tests/temporary_folder.h"
#include "monograph/merge/merge.h"
#include "monograph/quant_methods/list_weights.h"
#include "monograph/weights/weight.h"

namespace monograph {

struct Tensor {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::vector<float> values;
};

inline Tensor random_tensor(const std::string& name, std::vector<std::uint64_t> shape,
                            unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  std::uint64_t count = 1;
  for (const std::uint64_t size : shape) count *= size;
  Tensor tensor{name, std::move(shape), {}};
  for (std::uint64_t i = 0; i < count; ++i) tensor.values.push_back(normal(random));
  return tensor;
}

inline void write_tensors(const std::filesystem::path& file, const std::vector<Tensor>& tensors) {
  std::vector<safetensors::TensorSpec> specs;
  for (const Tensor& tensor : tensors)
    specs.push_back({tensor.name, safetensors::StoredDType::kF32, tensor.shape});
  safetensors::Writer writer(file, safetensors::plan_file(specs, {}));
  for (const Tensor& tensor : tensors) {
    writer.write(tensor.name, 0,
                 {reinterpret_cast<const std::uint8_t*>(tensor.values.data()),
                  tensor.values.size() * sizeof(float)});
  }
  writer.finish();
}

inline MergeSettings to(DType dtype) {
  MergeSettings settings;
  settings.dtype = dtype;
  return settings;
}

class Case {
 public:
  Case(const std::vector<Tensor>& base, const std::vector<std::vector<Tensor>>& adapters,
       const std::string& members) {
    write_tensors(folder_ / "model.safetensors", base);
    checkpoint_ = safetensors::Checkpoint::open(folder_.path());
    weights_ = list_weights(checkpoint_);
    for (std::size_t i = 0; i < adapters.size(); ++i) {
      const auto path = folder_ / ("adapter" + std::to_string(i));
      std::filesystem::create_directory(path);
      files::write_all(path / "adapter_config.json",
                       R"({"peft_type": "LORA", "r": 2, "lora_alpha": 3)" + members + "}");
      write_tensors(path / "adapter_model.safetensors", adapters[i]);
      adapters_.push_back(Adapter::open(path));
    }
  }

  MergePlan plan(const MergeSettings& settings = {}, double weight = 1,
                 const std::string& config = "{}") {
    weighted_.clear();
    for (const Adapter& adapter : adapters_) weighted_.push_back({&adapter, weight});
    config_ = json::parse(config, "config.json");
    return plan_merge(weights_, config_, weighted_, settings);
  }

  std::vector<MergeRow> merge(const MergeSettings& settings, int threads = 1, double weight = 1,
                              const std::string& config = "{}") {
    const MergePlan merge_plan = plan(settings, weight, config);
    std::filesystem::remove_all(folder_ / "out");
    std::filesystem::create_directory(folder_ / "out");
    safetensors::ShardedWriter writer(folder_ / "out",
                                      safetensors::plan_shards(merge_plan.specs(), {}, 1 << 30));
    ThreadPool pool(threads);
    std::vector<MergeRow> rows = run_merge(
        merge_plan, writer,
        [&](std::size_t n, std::size_t grain, ParallelBody body) {
          pool.parallel_for(n, grain, body);
        },
        [](std::uint64_t) {});
    writer.finish();
    return rows;
  }

  std::vector<std::uint8_t> output(const std::string& name) {
    const safetensors::Reader reader(folder_ / "out/model.safetensors");
    const auto bytes = reader.bytes(*reader.find(name));
    return {bytes.begin(), bytes.end()};
  }
  const files::TemporaryFolder& folder() const { return folder_; }

 private:
  files::TemporaryFolder folder_;
  safetensors::Checkpoint checkpoint_;
  std::vector<Weight> weights_;
  std::vector<Adapter> adapters_;
  std::vector<WeightedAdapter> weighted_;
  json::Value config_;
};

inline const std::string kPrefix = "base_model.model.";

// Three experts of [64, 128] in one tensor, and a LoRA of rank 2 that does not change the second.
struct ThreeExperts {
  static constexpr std::size_t kCount = 3;
  Tensor w = random_tensor("m.mlp.experts.gate_up_proj", {kCount, 64, 128}, 1);
  Tensor a = random_tensor(kPrefix + "m.mlp.experts.lora_A.weight", {2 * kCount, 128}, 2);
  Tensor b = random_tensor(kPrefix + "m.mlp.experts.lora_B.weight", {64, 2 * kCount}, 3);
  std::string config = R"({"hidden_size": 128})";
  std::string adapter_config =
      R"(, "target_parameters": ["mlp.experts.gate_up_proj"], "peft_version": "0.21.0")";

  ThreeExperts() {
    for (float& x : b.values) x *= 0.5f;
    for (std::size_t o = 0; o < 64; ++o) {
      for (std::size_t k = 0; k < 2; ++k) b.values[o * 2 * kCount + k * kCount + 1] = 0;
    }
  }
};

// A weight of a folder as it is read; empty where the folder has none of that name.
inline std::vector<float> decoded(const std::filesystem::path& folder, const std::string& name) {
  const auto checkpoint = safetensors::Checkpoint::open(folder);
  for (const Weight& weight : list_weights(checkpoint)) {
    if (weight.name != name) continue;
    std::vector<float> values(weight.elements);
    read_elements(weight, 0, weight.elements, DType::kFloat32, values.data());
    return values;
  }
  return {};
}

// scale * B * A of a linear layer.
inline double delta(const Tensor& a, const Tensor& b, std::size_t i, std::size_t j, double scale) {
  const std::size_t rank = a.shape[0], cols = a.shape[1];
  double sum = 0;
  for (std::size_t k = 0; k < rank; ++k) {
    sum += double{b.values[i * rank + k]} * double{a.values[k * cols + j]};
  }
  return scale * sum;
}

}  // namespace monograph
