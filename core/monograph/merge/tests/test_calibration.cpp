// The file of calibrated inputs: what is read, by which names it is found, what is refused; and
// packed outputs that are rounded along it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "monograph/base/error.h"
#include "monograph/merge/tests/merge_case.h"
#include "monograph/quant_methods/packed_parts.h"

namespace monograph {
namespace {

using safetensors::StoredDType;

constexpr std::size_t kRows = 48, kCols = 128;

struct Stored {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::vector<float> values;
  StoredDType dtype = StoredDType::kF32;
};

std::filesystem::path write_calibration(const files::TemporaryFolder& folder,
                                        const std::vector<Stored>& tensors,
                                        const std::string& version = "1") {
  const std::filesystem::path file = folder / "calibration.safetensors";
  std::vector<safetensors::TensorSpec> specs;
  for (const Stored& tensor : tensors) specs.push_back({tensor.name, tensor.dtype, tensor.shape});
  safetensors::Metadata metadata = {{"monograph.base_sha256", "abc"}};
  if (!version.empty()) metadata["monograph.calibration"] = version;
  safetensors::Writer writer(file, plan_file(specs, metadata));
  for (const Stored& tensor : tensors) {
    std::vector<std::uint8_t> bytes(tensor.values.size() *
                                    (tensor.dtype == StoredDType::kF32 ? 4 : 2));
    if (tensor.dtype == StoredDType::kF32)
      std::memcpy(bytes.data(), tensor.values.data(), bytes.size());
    writer.write(tensor.name, 0, bytes);
  }
  writer.finish();
  return file;
}

// The sketch and the diagonal of inputs that have few strong directions.
std::vector<Stored> inputs_of(const std::string& module, std::size_t inputs, std::size_t count,
                              unsigned seed) {
  Tensor sketch = random_tensor(module + ".sketch", {count, inputs}, seed);
  const Tensor rest = random_tensor("", {inputs}, seed + 1);
  Stored diagonal{module + ".diagonal", {inputs}, {}};
  for (std::size_t i = 0; i < inputs; ++i) {
    double sum = 0.3 * rest.values[i] * rest.values[i];
    for (std::size_t k = 0; k < count; ++k) {
      sketch.values[k * inputs + i] *= 20.0f / static_cast<float>(1 + k);
      sum += std::pow(double{sketch.values[k * inputs + i]}, 2);
    }
    diagonal.values.push_back(static_cast<float>(sum));
  }
  return {{sketch.name, sketch.shape, sketch.values}, diagonal};
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Calibration, GivesTheMomentsAtAMeanDiagonalOfOne) {
  const files::TemporaryFolder folder;
  const auto tensors = inputs_of("a.q", 30, 3, 1);
  const Calibration calibration(write_calibration(folder, tensors));
  EXPECT_EQ(calibration.base_sha256(), "abc");
  const CalibratedInputs* inputs = calibration.find("a.q.weight", 30);
  ASSERT_NE(inputs, nullptr);
  const InputMoments moments = inputs->moments();
  double mean = 0;
  for (const float x : tensors[1].values) mean += double{x} / 30;
  ASSERT_EQ(moments.count, 3u);
  for (std::size_t i = 0; i < 30; ++i) {
    double left = tensors[1].values[i] / mean;
    for (std::size_t k = 0; k < 3; ++k) {
      const double wanted = tensors[0].values[k * 30 + i] / std::sqrt(mean);
      EXPECT_NEAR(moments.g[i * 3 + k], wanted, 1e-12);
      left -= wanted * wanted;
    }
    EXPECT_NEAR(moments.d[i], std::max(left, 0.0) + 0.01, 1e-9);
  }
}

TEST(Calibration, IsFoundByTheNamesThatFilesHaveForExperts) {
  const files::TemporaryFolder folder;
  std::vector<Stored> all;
  for (const char* module :
       {"l.0.mlp.experts.gate_up_proj", "l.0.mlp.experts.down_proj", "l.0.self_attn.q_proj",
        "l.1.block_sparse_moe.experts.gate_up_proj", "l.1.block_sparse_moe.experts.down_proj"}) {
    for (Stored& tensor : inputs_of(module, 8, 2, 1)) all.push_back(std::move(tensor));
  }
  auto silent = inputs_of("l.0.self_attn.k_proj", 8, 2, 1);
  for (Stored& tensor : silent) std::fill(tensor.values.begin(), tensor.values.end(), 0.0f);
  all.insert(all.end(), silent.begin(), silent.end());
  const Calibration calibration(write_calibration(folder, all));
  for (const char* name :
       {"l.0.self_attn.q_proj.weight", "l.0.mlp.experts.gate_up_proj",
        "l.0.mlp.experts.7.gate_proj.weight", "l.0.mlp.experts.7.up_proj.weight",
        "l.0.block_sparse_moe.experts.3.w1.weight", "l.0.block_sparse_moe.experts.3.w3.weight",
        "l.0.block_sparse_moe.experts.gate_up_proj", "l.1.block_sparse_moe.input_linear.weight"}) {
    EXPECT_NE(calibration.find(name), nullptr) << name;
  }
  EXPECT_EQ(calibration.find("l.0.block_sparse_moe.experts.3.w2.weight"),
            calibration.find("l.0.mlp.experts.down_proj"));
  EXPECT_EQ(calibration.find("l.1.block_sparse_moe.output_linear.weight"),
            calibration.find("l.1.block_sparse_moe.experts.down_proj"));
  EXPECT_EQ(calibration.find("l.0.self_attn.k_proj.weight"), nullptr);  // no token came by
  EXPECT_EQ(calibration.find("l.2.self_attn.q_proj.weight"), nullptr);
  EXPECT_NE(message_of([&] { calibration.find("l.0.self_attn.q_proj.weight", 9); })
                .find("for weight 'l.0.self_attn.q_proj.weight': has a sketch of 8 inputs, the "
                      "weight has 9"),
            std::string::npos);
}

TEST(Calibration, RefusesWhatItIsNotByName) {
  const files::TemporaryFolder folder;
  const auto good = inputs_of("a", 6, 2, 1);
  const auto expect = [&](const std::vector<Stored>& tensors, const std::string& text,
                          const std::string& version = "1") {
    const std::string found =
        message_of([&] { Calibration(write_calibration(folder, tensors, version)); });
    EXPECT_NE(found.find(text), std::string::npos) << found;
  };
  expect(good, "\"monograph.calibration\" is missing, wanted \"1\"", "");
  expect(good, "\"monograph.calibration\" is '2', wanted \"1\"", "2");
  expect({good[0]}, "tensor 'a.sketch': has no 'a.diagonal' beside it");
  expect({good[1]}, "tensor 'a.diagonal': has no 'a.sketch' beside it");
  auto bad = good;
  bad.push_back({"b.weight", {1}, {1}});
  expect(bad, "tensor 'b.weight': is neither MODULE.sketch nor MODULE.diagonal");
  bad = good;
  bad[0].dtype = StoredDType::kBF16;
  expect(bad, "tensor 'a.sketch': has type bf16, wanted F32");
  bad = good;
  bad[0].shape = {12};
  expect(bad, "tensor 'a.sketch': has shape [12], wanted [1 to 64, inputs]");
  expect(inputs_of("a", 2, 65, 1), "tensor 'a.sketch': has shape [65, 2]");
  bad = good;
  bad[1] = {"a.diagonal", {5}, std::vector<float>(5)};
  expect(bad, "tensor 'a.diagonal': has shape [5], wanted [6]");
  bad = good;
  bad[0].values[7] = NAN;
  expect(bad, "tensor 'a.sketch': element 7 is nan, wanted a finite number");
  bad = good;
  bad[1].values[3] = -1;
  expect(bad, "tensor 'a.diagonal': element 3 is -1.000000, wanted a mean of squares");
}

TEST(Calibration, RefusesASketchThatContradictsItsDiagonal) {
  const files::TemporaryFolder folder;
  const auto read = [&](float factor, std::size_t column) {
    auto tensors = inputs_of("a", 6, 2, 1);
    for (const std::size_t row : {0, 1}) tensors[0].values[row * 6 + column] *= factor;
    return message_of([&] { Calibration(write_calibration(folder, tensors)); });
  };
  for (const std::size_t column : {0, 3, 5}) {
    EXPECT_EQ(read(1.05f, column), "no error");
    const std::string wanted =
        "tensor 'a.sketch': the squares of column " + std::to_string(column) + " sum up to ";
    EXPECT_NE(read(30, column).find(wanted), std::string::npos) << read(30, column);
  }
  auto tensors = inputs_of("a", 6, 2, 1);
  std::fill(tensors[1].values.begin(), tensors[1].values.end(), 0.0f);
  const std::string found = message_of([&] { Calibration(write_calibration(folder, tensors)); });
  EXPECT_NE(found.find("wanted at most its diagonal, 0.000000"), std::string::npos) << found;
}

MergeSettings calibrated(Format format, std::size_t block, const Calibration& calibration) {
  MergeSettings settings;
  settings.format = format;
  settings.block = block;
  settings.rounding = Rounding::kCalibrated;
  settings.calibration = &calibration;
  return settings;
}

// Sum over rows of e H e^T for H of the inputs.
double weighed_error(const InputMoments& moments, const std::vector<double>& error) {
  double sum = 0;
  const std::size_t cols = moments.d.size();
  for (std::size_t at = 0; at < error.size(); at += cols) {
    for (std::size_t k = 0; k < moments.count; ++k) {
      double dot = 0;
      for (std::size_t j = 0; j < cols; ++j)
        dot += error[at + j] * moments.g[j * moments.count + k];
      sum += dot * dot;
    }
    for (std::size_t j = 0; j < cols; ++j) sum += moments.d[j] * error[at + j] * error[at + j];
  }
  return sum;
}

TEST(CalibratedRounding, KeepsTheErrorOutOfTheInputsInEveryFormat) {
  const files::TemporaryFolder folder;
  const Calibration calibration(write_calibration(folder, inputs_of("q", kCols, 6, 3)));
  const Tensor w = random_tensor("q.weight", {kRows, kCols}, 1);
  const Tensor other = random_tensor("k.weight", {kRows, kCols}, 2);
  Tensor a = random_tensor(kPrefix + "q.lora_A.weight", {2, kCols}, 4);
  Tensor b = random_tensor(kPrefix + "q.lora_B.weight", {kRows, 2}, 5);
  for (float& x : b.values) x *= 0.35f;
  Case merge_case({w, other}, {{a, b}}, "");
  const InputMoments moments = calibration.find("q.weight")->moments();
  const std::pair<Format, std::size_t> formats[] = {
      {Format::kNf4, 64},         {Format::kFp4, 64},   {Format::kMxfp4, 32},
      {Format::kNvfp4Divide, 16}, {Format::kMxfp8, 32}, {Format::kFp8Block, 128}};
  for (const auto& [format, block] : formats) {
    double weighed[3], along[3];
    std::vector<std::uint8_t> first;
    for (const Rounding rounding :
         {Rounding::kNearest, Rounding::kAdapter, Rounding::kCalibrated}) {
      MergeSettings settings = calibrated(format, block, calibration);
      settings.rounding = rounding;
      const auto rows = merge_case.merge(settings, 2);
      std::vector<double> error;
      const std::vector<float> stored = decoded(merge_case.folder() / "out", "q.weight");
      ASSERT_EQ(stored.size(), kRows * kCols);
      for (std::size_t i = 0; i < stored.size(); ++i) {
        error.push_back(double{stored[i]} - w.values[i] - delta(a, b, i / kCols, i % kCols, 1.5));
      }
      weighed[static_cast<int>(rounding)] = weighed_error(moments, error);
      along[static_cast<int>(rounding)] = rows.at(0).survival.error_along_adapter();
      if (rounding == Rounding::kCalibrated) {
        const MergePlan plan = merge_case.plan(settings);
        EXPECT_EQ(plan.calibrated, 1u);
        EXPECT_EQ(plan.not_calibrated, 1u);
      }
    }
    EXPECT_LT(weighed[2], weighed[1] / 4) << written_name(format);
    EXPECT_LT(weighed[2], weighed[0] / 4) << written_name(format);
    EXPECT_LT(along[2], along[0] / 2) << written_name(format);
  }
}

TEST(CalibratedRounding, GivesTheSameBytesForAnyNumberOfThreads) {
  const files::TemporaryFolder folder;
  const Calibration calibration(write_calibration(folder, inputs_of("q", 192, 5, 3)));
  const Tensor w = random_tensor("q.weight", {301, 192}, 1);
  Tensor a = random_tensor(kPrefix + "q.lora_A.weight", {2, 192}, 4);
  Tensor b = random_tensor(kPrefix + "q.lora_B.weight", {301, 2}, 5);
  Case merge_case({w}, {{a, b}}, "");
  MergeSettings settings = calibrated(Format::kNf4, 64, calibration);
  settings.double_quant = true;
  merge_case.merge(settings, 1);
  const auto wanted = merge_case.output("q.weight");
  for (const int threads : {2, 3, 4}) {
    merge_case.merge(settings, threads);
    EXPECT_EQ(merge_case.output("q.weight"), wanted);
  }
}

TEST(CalibratedRounding, OfAWeightThatTheFileDoesNotKnowIsThatAlongTheAdapter) {
  const files::TemporaryFolder folder;
  const Calibration calibration(write_calibration(folder, inputs_of("k", kCols, 5, 3)));
  const Tensor w = random_tensor("q.weight", {kRows, kCols}, 1);
  const Tensor other = random_tensor("k.weight", {kRows, kCols}, 2);
  Tensor a = random_tensor(kPrefix + "q.lora_A.weight", {2, kCols}, 4);
  Tensor b = random_tensor(kPrefix + "q.lora_B.weight", {kRows, 2}, 5);
  Case merge_case({w, other}, {{a, b}}, "");
  MergeSettings settings = calibrated(Format::kNf4, 64, calibration);
  merge_case.merge(settings);
  const auto q = merge_case.output("q.weight"), k = merge_case.output("k.weight");
  settings.rounding = Rounding::kAdapter;
  merge_case.merge(settings);
  EXPECT_EQ(merge_case.output("q.weight"), q);
  EXPECT_NE(merge_case.output("k.weight"), k);  // its inputs are known, though no LoRA changes it
  const Calibration none(write_calibration(folder, inputs_of("x", kCols, 5, 3)));
  settings = calibrated(Format::kNf4, 64, none);
  EXPECT_NE(message_of([&] {
              merge_case.plan(settings);
            }).find("has the inputs of none of the 2 packed weights"),
            std::string::npos);
  const Calibration wrong(write_calibration(folder, inputs_of("q", kCols + 1, 5, 3)));
  settings = calibrated(Format::kNf4, 64, wrong);
  EXPECT_NE(message_of([&] { merge_case.plan(settings); }).find("sketch of 129 inputs"),
            std::string::npos);
}

TEST(CalibratedRounding, OfExpertsTakesTheInputsThatAllShare) {
  constexpr std::size_t kExperts = ThreeExperts::kCount;
  const ThreeExperts experts;
  const files::TemporaryFolder folder;
  const Calibration calibration(
      write_calibration(folder, inputs_of("m.mlp.experts.gate_up_proj", 128, 4, 3)));
  const auto& [w, a, b, config, adapter_config] = experts;
  Case merge_case({w}, {{a, b}}, adapter_config);
  const InputMoments moments = calibration.find("m.mlp.experts.gate_up_proj")->moments();
  for (const bool nested : {false, true}) {
    double weighed[3][kExperts];
    for (const Rounding rounding :
         {Rounding::kNearest, Rounding::kAdapter, Rounding::kCalibrated}) {
      MergeSettings settings = calibrated(Format::kNf4, 64, calibration);
      settings.rounding = rounding;
      settings.double_quant = nested;
      settings.experts = ExpertsOutput::kStack;
      merge_case.merge(settings, 2, 1, config);
      const auto stored = decoded(merge_case.folder() / "out", "m.mlp.experts.gate_up_proj");
      ASSERT_EQ(stored.size(), w.values.size());
      for (std::size_t expert = 0; expert < kExperts; ++expert) {
        std::vector<double> error;
        for (std::size_t i = 0; i < 64 * 128; ++i) {
          double meant = w.values[expert * 64 * 128 + i];
          for (std::size_t k = 0; k < 2; ++k) {
            meant += 1.5 * double{b.values[i / 128 * 2 * kExperts + k * kExperts + expert]} *
                     a.values[(expert * 2 + k) * 128 + i % 128];
          }
          error.push_back(stored[expert * 64 * 128 + i] - meant);
        }
        weighed[static_cast<int>(rounding)][expert] = weighed_error(moments, error);
      }
    }
    // Directions of an adapter on 128 inputs leave little room for those of the inputs.
    for (std::size_t expert = 0; expert < kExperts; ++expert) {
      const double without = weighed[1][expert];  // of the second expert that of the nearest
      EXPECT_LT(weighed[2][expert], without / (expert == 1 ? 4 : 1)) << nested << " " << expert;
    }
  }
}

}  // namespace
}  // namespace monograph
