// Every type a base tensor can be stored in against every kind of change an adapter can make: the
// change is in the output, or the merge is refused by name. It is never dropped.
#include <gtest/gtest.h>

#include <cstring>

#include "monograph/files/tests/temporary_folder.h"
#include "monograph/merge/merge.h"
#include "monograph/quant_methods/list_weights.h"
#include "monograph/quant_methods/tests/tensor_list.h"

namespace monograph {
namespace {

using namespace files;
using namespace safetensors;

constexpr std::uint64_t kRows = 4, kCols = 8;  // whole bytes in 4 and 6 bits too

struct Change {
  const char* what;     // as the error names it
  const char* weight;   // of the base
  const char* members;  // of adapter_config.json, after r = 1 and lora_alpha = 1
  std::vector<TestTensor> tensors;
  float wanted;  // of element 0, where the base is all ones
};

std::string floats(std::size_t count, float value) {
  const std::vector<float> values(count, value);
  return bytes_of(values.data(), count);
}

TestTensor part(const std::string& name, std::vector<std::uint64_t> shape, float value) {
  std::uint64_t count = 1;
  for (const std::uint64_t size : shape) count *= size;
  return {"base_model.model." + name, StoredDType::kF32, std::move(shape), floats(count, value)};
}

std::vector<Change> changes() {
  const TestTensor a = part("q.lora_A.weight", {1, kCols}, 0.5f);
  const TestTensor b = part("q.lora_B.weight", {kRows, 1}, 0.5f);
  return {
      {"LoRA", "q.weight", "", {a, b}, 1.25f},
      // A row of eight ones and a half: its norm is 1.25 * sqrt(8).
      {"DoRA",
       "q.weight",
       R"(, "use_dora": true)",
       {a, b, part("q.lora_magnitude_vector", {kRows}, 2.0f)},
       0.70710678f},
      {"LoRA",
       "embed_tokens.weight",
       "",
       {part("embed_tokens.lora_embedding_A", {1, kRows}, 0.5f),
        part("embed_tokens.lora_embedding_B", {kCols, 1}, 0.5f)},
       1.25f},
      {"lora_bias",
       "q.bias",
       R"(, "lora_bias": true)",
       {a, b, part("q.lora_B.bias", {kRows}, 0.5f)},
       1.5f},
      {"a replaced weight", "q.bias", "", {part("q.bias", {kRows}, 0.25f)}, 0.25f},
      {"a replaced weight",
       "embed_tokens.weight",
       "",
       {part("embed_tokens.modules_to_save.weight", {kRows, kCols}, 0.25f)},
       0.25f},
      {"trained tokens",
       "embed_tokens.weight",
       R"(, "trainable_token_indices": [0])",
       {part("embed_tokens.token_adapter.trainable_tokens_delta", {1, kCols}, 0.25f)},
       0.25f},
  };
}

template <class T>
std::string ones(std::size_t count) {
  const std::vector<T> values(count, from_float<T>(1.0f));
  return bytes_of(values.data(), count);
}

// Ones where the merge computes with the type, else zeros.
std::string base_bytes(StoredDType dtype, std::size_t count) {
  if (dtype == StoredDType::kF32) return ones<float>(count);
  if (dtype == StoredDType::kBF16) return ones<Bf16>(count);
  if (dtype == StoredDType::kF16) return ones<Fp16>(count);
  return {};
}

float first_element(const std::string& bytes, StoredDType dtype) {
  const auto as = [&]<class T>(T value) {
    std::memcpy(&value, bytes.data(), sizeof value);
    return to_float(value);
  };
  if (dtype == StoredDType::kF32) return as(0.0f);
  return dtype == StoredDType::kBF16 ? as(Bf16{}) : as(Fp16{});
}

// The weight that changes has `dtype`, the others are fp32.
struct Merged {
  Merged(const Change& change, StoredDType dtype, const MergeSettings& settings) {
    TensorList base;
    const auto add = [&](const char* name, std::vector<std::uint64_t> shape, std::size_t count) {
      const StoredDType type = std::strcmp(name, change.weight) == 0 ? dtype : StoredDType::kF32;
      base.add(name, type, std::move(shape), base_bytes(type, count));
    };
    add("embed_tokens.weight", {kRows, kCols}, kRows * kCols);
    add("lm_head.weight", {kRows, kCols}, kRows * kCols);
    add("q.bias", {kRows}, kRows);
    add("q.weight", {kRows, kCols}, kRows * kCols);
    TensorList adapter;
    for (const TestTensor& tensor : change.tensors) {
      adapter.add(tensor.name, tensor.dtype, tensor.shape, tensor.bytes);
    }
    write_all(folder / "model.safetensors", base.file());
    write_all(folder / "adapter_model.safetensors", adapter.file());
    write_all(folder / "adapter_config.json", R"({"peft_type": "LORA", "r": 1, "lora_alpha": 1)" +
                                                  std::string(change.members) + "}");
    const Checkpoint checkpoint = Checkpoint::open(folder.path());
    const std::vector<Weight> weights = list_weights(checkpoint);
    const Adapter opened = Adapter::open(folder.path());
    const WeightedAdapter weighted{&opened, 1};
    const json::Value config = json::parse("{}", "config.json");
    const MergePlan plan = plan_merge(weights, config, {&weighted, 1}, settings);
    std::filesystem::create_directory(folder / "out");
    ShardedWriter writer(folder / "out", plan_shards(plan.specs(), {}, 1 << 30));
    rows = run_merge(plan, writer, serial_for, [](std::uint64_t) {});
    writer.finish();
    const Reader reader(folder / "out/model.safetensors");
    const auto bytes = reader.bytes(*reader.find(change.weight));
    output.assign(bytes.begin(), bytes.end());
  }

  TemporaryFolder folder;
  std::vector<MergeRow> rows;
  std::string output;
};

TEST(MergeStoredDTypes, EveryChangeOfEveryTypeIsDoneOrRefusedByName) {
  std::size_t done = 0, refused = 0;
  for (std::size_t i = 0; i < kStoredDTypes.size(); ++i) {
    const auto dtype = static_cast<StoredDType>(i);
    for (const Change& change : changes()) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + change.what + " of " + change.weight);
      if (float_type(dtype)) {
        const Merged merged(change, dtype, {});
        EXPECT_NEAR(first_element(merged.output, dtype), change.wanted, 1.0 / 256);
        EXPECT_TRUE(std::any_of(merged.rows.begin(), merged.rows.end(),
                                [&](const MergeRow& row) { return row.name == change.weight; }));
        ++done;
        continue;
      }
      for (const bool with_type : {false, true}) {
        MergeSettings settings;
        if (with_type) settings.dtype = DType::kBFloat16;
        const std::string error = error_of([&] { Merged(change, dtype, settings); });
        EXPECT_NE(error.find("for weight '" + std::string(change.weight) + "': " + change.what +
                             " cannot be applied to " + std::string(short_name(dtype))),
                  std::string::npos)
            << error;
        ++refused;
      }
    }
  }
  EXPECT_EQ(done, 3 * changes().size());
  EXPECT_EQ(refused, 2 * 19 * changes().size());
}

TEST(MergeStoredDTypes, ABaseThatWasLoadedPackedHasNo64BitLinearLayer) {
  MergeSettings settings;
  settings.base_as = Format::kNf4;
  // The bias is what the adapter changes; the matrix beside it is the one of 64 bits.
  Change change = changes()[4];
  change.weight = "q.weight";
  const std::string error = error_of([&] { Merged(change, StoredDType::kF64, settings); });
  EXPECT_NE(error.find("weight 'q.weight': is fp64, which is never loaded in a packed format"),
            std::string::npos)
      << error;
}

}  // namespace
}  // namespace monograph
