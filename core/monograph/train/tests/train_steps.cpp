// Steps of the native trainer on batches of a file, and what they leave:
//   train_steps BASE ADAPTER BATCHES.safetensors OUT.safetensors SETTINGS.json
// Micro-batch M of step N is N.M.input_ids, .labels [rows, length] int64, .positions [length] int64
// and .offsets int32, and .key_lengths int32 where rows are padded.
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>

#include "monograph/base/error.h"
#include "monograph/kernels/linear_cross_entropy/linear_cross_entropy.h"
#include "monograph/safetensors/writer.h"
#include "monograph/train/train_step.h"

namespace {

using namespace monograph;
using namespace monograph::train;
using safetensors::Checkpoint;

template <class T>
std::vector<T> values(const Checkpoint& file, const std::string& name) {
  const safetensors::LocatedTensor* const tensor = file.find(name);
  if (tensor == nullptr) return {};
  const std::span<const std::uint8_t> bytes = tensor->bytes();
  std::vector<T> found(bytes.size() / sizeof(T));
  std::memcpy(found.data(), bytes.data(), bytes.size());
  return found;
}

Batch read_batch(const Checkpoint& file, const std::string& at) {
  Batch batch;
  batch.ids = values<std::int64_t>(file, at + "input_ids");
  batch.length = file.find(at + "input_ids")->entry->shape[1];
  batch.rows = batch.ids.size() / batch.length;
  const std::vector<std::int64_t> labels = values<std::int64_t>(file, at + "labels");
  for (std::size_t i = 0; i < labels.size(); ++i)
    batch.targets.push_back((i + 1) % batch.length == 0 ? kIgnoredLabel : labels[i + 1]);
  batch.positions = values<std::int64_t>(file, at + "positions");
  batch.offsets = values<std::int32_t>(file, at + "offsets");
  batch.key_lengths = values<std::int32_t>(file, at + "key_lengths");
  return batch;
}

int run(char** arguments) {
  std::ifstream stream(arguments[5]);
  const std::string text((std::istreambuf_iterator<char>(stream)), {});
  const json::Value json = json::parse(text, arguments[5]);
  const auto number = [&](const char* key) { return *json.find(key)->as_double(); };
  StepSettings settings;
  settings.weight_decay = number("weight_decay");
  settings.max_grad_norm = number("max_grad_norm");
  settings.dropout = number("dropout");
  settings.seed = *json.find("seed")->as_unsigned();
  settings.leaves = *json.find("leaves")->as_unsigned();
  settings.recompute = *json.find("recompute")->as_bool();

  ThreadPool pool(static_cast<int>(number("threads")));
  const auto each = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  const BaseModel base(arguments[1], *find_dtype(json.find("dtype")->text()));
  LoraParameters parameters = read_parameters(Adapter::open(arguments[2]), base);
  TrainStep step(base, parameters, settings, {each, pool.threads()});
  const Checkpoint batches = Checkpoint::open(arguments[3]);
  std::vector<float> losses, norms;
  for (std::size_t i = 0; i < static_cast<std::size_t>(number("steps")); ++i) {
    std::vector<Batch> micro_batches;
    for (std::size_t m = 0;; ++m) {
      const std::string at = std::to_string(i) + "." + std::to_string(m) + ".";
      if (batches.find(at + "input_ids") == nullptr) break;
      micro_batches.push_back(read_batch(batches, at));
    }
    const StepResult result = step(micro_batches, number("learning_rate"));
    losses.push_back(result.loss);
    norms.push_back(result.grad_norm);
  }
  const std::pair<const char*, const std::vector<float>*> written[] = {
      {"loss", &losses},
      {"norm", &norms},
      {"flat", &parameters.values},
      {"exp_avg", &parameters.exp_avg},
      {"exp_avg_sq", &parameters.exp_avg_sq}};
  std::vector<safetensors::TensorSpec> specs;
  for (const auto& [name, tensor] : written)
    specs.push_back({name, safetensors::StoredDType::kF32, {tensor->size()}});
  safetensors::Writer writer(arguments[4], safetensors::plan_file(specs, {}));
  for (const auto& [name, tensor] : written)
    writer.write(name, 0,
                 {reinterpret_cast<const std::uint8_t*>(tensor->data()), tensor->size() * 4});
  writer.finish();
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 6) return 2;
  try {
    return run(arguments);
  } catch (const monograph::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
