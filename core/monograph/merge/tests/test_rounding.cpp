// Packed outputs rounded along the adapter: what the report says against the bytes read back, and
// the same bytes however they are computed.
#include <gtest/gtest.h>

#include <cmath>

#include "monograph/merge/tests/merge_case.h"
#include "monograph/quant_methods/packed_parts.h"

namespace monograph {
namespace {

constexpr std::size_t kRows = 96, kCols = 256;

struct Packing {
  Format format;
  std::size_t block;
  ScaleRule rule = ScaleRule::kDefault;
};
constexpr Packing kNf4 = {Format::kNf4, 64};
// Of groups of a row with and without zero points; a block of 0 is the row.
constexpr Packing kPackings[] = {kNf4,
                                 {Format::kFp4, 64},
                                 {Format::kMxfp4, 32},
                                 {Format::kMxfp8, 32},
                                 {Format::kNvfp4Divide, 16},
                                 {Format::kFp8Block, 128},
                                 {Format::kInt4Bf16, 32},
                                 {Format::kInt4Bf16, 64, ScaleRule::kMinMax},
                                 {Format::kInt4Bf16, 0},
                                 {Format::kInt8PackedBf16, 0},
                                 {Format::kInt8PackedBf16, 64, ScaleRule::kMinMax},
                                 {Format::kFp8RowBf16, 0}};

MergeSettings packed(const Packing& packing, Rounding rounding, bool double_quant = false) {
  MergeSettings settings;
  settings.format = packing.format;
  settings.block = packing.block;
  settings.rule = packing.rule;
  settings.double_quant = double_quant;
  settings.rounding = rounding;
  return settings;
}

// A LoRA of rank 2 whose change is about 8 % of the weight.
struct Lora {
  Tensor a, b;
};
Lora lora(const std::string& module, std::size_t rows, std::size_t cols, unsigned seed) {
  Lora made{random_tensor(kPrefix + module + ".lora_A.weight", {2, cols}, seed),
            random_tensor(kPrefix + module + ".lora_B.weight", {rows, 2}, seed + 1)};
  for (float& x : made.b.values) x *= 0.35f;
  return made;
}

struct Bytes {
  std::vector<std::vector<std::uint8_t>> tensors;
  bool operator==(const Bytes&) const = default;
};

Bytes all_bytes(const std::filesystem::path& file) {
  const safetensors::Reader reader(file);
  Bytes bytes;
  for (const auto& entry : reader.header().tensors) {
    const auto one = reader.bytes(entry);
    bytes.tensors.emplace_back(one.begin(), one.end());
  }
  return bytes;
}

TEST(AdapterRounding, KeepsTheChangeThatNearestLosesInEveryFormat) {
  const Tensor w = random_tensor("q.weight", {kRows, kCols}, 1);
  const Lora change = lora("q", kRows, kCols, 2);
  Case merge_case({w}, {{change.a, change.b}}, "");
  for (const Packing& packing : kPackings) {
    const Format format = packing.format;
    for (const bool nested : {false, true}) {
      if (nested && format != Format::kNf4 && format != Format::kFp4) continue;
      double errors[2], whole[2];
      for (const Rounding rounding : {Rounding::kNearest, Rounding::kAdapter}) {
        const auto rows = merge_case.merge(packed(packing, rounding, nested));
        const std::vector<float> stored = decoded(merge_case.folder() / "out", "q.weight");
        ASSERT_EQ(stored.size(), w.values.size());
        // Along V of rank 2: the row space of A, by Gram and Schmidt.
        std::vector<double> v[2];
        for (std::size_t k = 0; k < 2; ++k) {
          v[k].assign(change.a.values.begin() + static_cast<long>(k * kCols),
                      change.a.values.begin() + static_cast<long>((k + 1) * kCols));
          for (std::size_t p = 0; p < k; ++p) {
            double dot = 0;
            for (std::size_t j = 0; j < kCols; ++j) dot += v[k][j] * v[p][j];
            for (std::size_t j = 0; j < kCols; ++j) v[k][j] -= dot * v[p][j];
          }
          double norm = 0;
          for (const double x : v[k]) norm += x * x;
          for (double& x : v[k]) x /= std::sqrt(norm);
        }
        double meant = 0, product = 0, error = 0, all = 0;
        for (std::size_t i = 0; i < kRows; ++i) {
          double along[2] = {};
          for (std::size_t j = 0; j < kCols; ++j) {
            const double wanted = delta(change.a, change.b, i, j, 1.5);
            const double found = double{stored[i * kCols + j]} - w.values[i * kCols + j];
            meant += wanted * wanted;
            product += wanted * found;
            all += (found - wanted) * (found - wanted);
            for (std::size_t k = 0; k < 2; ++k) along[k] += (found - wanted) * v[k][j];
          }
          error += along[0] * along[0] + along[1] * along[1];
        }
        const Survival& survival = rows.at(0).survival;
        EXPECT_NEAR(survival.kept(), product / meant, 1e-6);
        EXPECT_NEAR(survival.error_along_adapter(), std::sqrt(error / meant), 1e-6);
        errors[static_cast<int>(rounding)] = survival.error_along_adapter();
        whole[static_cast<int>(rounding)] = std::sqrt(all);
      }
      EXPECT_LT(errors[1], errors[0] / 4) << written_name(format);
      EXPECT_LT(whole[1], 1.3 * whole[0]) << written_name(format);
    }
  }
}

TEST(AdapterRounding, GivesTheSameBytesForAnyNumberOfThreads) {
  const Tensor w = random_tensor("q.weight", {301, 320}, 1);
  const Lora first = lora("q", 301, 320, 2), second = lora("q", 301, 320, 4);
  Case merge_case({w}, {{first.a, first.b}, {second.a, second.b}}, "");
  for (const Packing& packing : kPackings) {
    const MergeSettings settings =
        packed(packing, Rounding::kAdapter, packing.format == Format::kNf4);
    Bytes wanted;
    for (const int threads : {1, 2, 3, 4}) {
      const auto rows = merge_case.merge(settings, threads, 0.5);
      EXPECT_LT(rows.at(0).survival.error_along_adapter(), 0.2);
      const Bytes bytes = all_bytes(merge_case.folder() / "out/model.safetensors");
      if (threads == 1) wanted = bytes;
      EXPECT_EQ(bytes, wanted) << written_name(packing.format) << " " << threads;
    }
  }
}

TEST(AdapterRounding, OfAZeroAdapterHasTheBytesOfNearest) {
  const Tensor w = random_tensor("q.weight", {kRows, kCols}, 1);
  const Tensor other = random_tensor("k.weight", {kRows, kCols}, 7);
  Lora change = lora("q", kRows, kCols, 2);
  std::fill(change.b.values.begin(), change.b.values.end(), 0.0f);
  Case merge_case({w, other}, {{change.a, change.b}}, "");
  for (const Packing& packing : kPackings) {
    merge_case.merge(packed(packing, Rounding::kNearest));
    const Bytes wanted = all_bytes(merge_case.folder() / "out/model.safetensors");
    const auto rows = merge_case.merge(packed(packing, Rounding::kAdapter));
    EXPECT_EQ(all_bytes(merge_case.folder() / "out/model.safetensors"), wanted);
    EXPECT_EQ(rows.at(0).survival.error_along_adapter(), 0);
    EXPECT_EQ(rows.at(0).survival.kept(), 1);
  }
}

// Of groups of a row: what no adapter changes keeps every byte, and what one changes its scales, as
// far as its values fit; with new ones values of the base would lie between the steps.
TEST(AdapterRounding, KeepsTheScalesOfABaseOfTheSameGroups) {
  const Tensor q = random_tensor("q.weight", {kRows, kCols}, 1);
  const Tensor k = random_tensor("k.weight", {kRows, kCols}, 7);
  Lora change = lora("q", kRows, kCols, 2);
  for (float& x : change.b.values) x *= 0.05f;
  Case merge_case({q, k}, {{change.a, change.b}}, "");
  std::size_t packings = 0;
  for (const Packing& packing : kPackings) {
    if (find_format(packing.format)->shape != BlockShape::kGroup) continue;
    ++packings;
    MergeSettings settings = packed(packing, Rounding::kNearest);
    merge_case.merge(settings, 1, 0);  // the base, quantised
    const auto file = merge_case.folder() / "out/model.safetensors";
    const Bytes base = all_bytes(file);
    const std::vector<float> before = decoded(merge_case.folder() / "out", "q.weight");
    const auto scales = merge_case.output("q.weight_scale");
    settings.base_as = packing.format;
    settings.base_block = packing.block;
    settings.base_rule = packing.rule;
    merge_case.merge(settings, 1, 0);
    EXPECT_EQ(all_bytes(file), base) << written_name(packing.format);
    settings.rounding = Rounding::kAdapter;
    const auto rows = merge_case.merge(settings, 2);
    const auto after = merge_case.output("q.weight_scale");
    std::size_t equal = 0, groups = scales.size() / sizeof(float);
    for (std::size_t i = 0; i < groups; ++i) {
      equal += std::equal(&scales[4 * i], &scales[4 * i] + 4, &after[4 * i]) ? 1 : 0;
    }
    EXPECT_GT(static_cast<double>(equal), 0.5 * static_cast<double>(groups))
        << written_name(packing.format);
    EXPECT_LT(rows.at(0).survival.error_along_adapter(), 0.5);
    // The same values from a base that is not packed get new scales. Those of int4 without zero
    // points lie between the steps of the base; others are about as good.
    const auto error = [&](const std::filesystem::path& folder) {
      const std::vector<float> stored = decoded(folder, "q.weight");
      double sum = 0;
      for (std::size_t i = 0; i < stored.size(); ++i) {
        const double wanted = before[i] + delta(change.a, change.b, i / kCols, i % kCols, 1.5);
        sum += (stored[i] - wanted) * (stored[i] - wanted);
      }
      return std::sqrt(sum);
    };
    Case dense({{"q.weight", {kRows, kCols}, before}}, {{change.a, change.b}}, "");
    dense.merge(packed(packing, Rounding::kAdapter));
    EXPECT_LT(error(merge_case.folder() / "out"), 1.1 * error(dense.folder() / "out"));
    if (packing.format == Format::kInt4Bf16 && packing.rule == ScaleRule::kDefault) {
      EXPECT_LT(error(merge_case.folder() / "out"), 0.8 * error(dense.folder() / "out"));
    }
  }
  EXPECT_EQ(packings, 6u);
}

TEST(AdapterRounding, LeavesWeightsWithoutAnAdapterAsNearestHasThem) {
  const Tensor w = random_tensor("q.weight", {kRows, kCols}, 1);
  const Tensor other = random_tensor("k.weight", {kRows, kCols}, 7);
  const Lora change = lora("q", kRows, kCols, 2);
  Case merge_case({w, other}, {{change.a, change.b}}, "");
  merge_case.merge(packed(kNf4, Rounding::kNearest));
  const auto k = merge_case.output("k.weight"), q = merge_case.output("q.weight");
  merge_case.merge(packed(kNf4, Rounding::kAdapter));
  EXPECT_EQ(merge_case.output("k.weight"), k);
  EXPECT_NE(merge_case.output("q.weight"), q);
}

TEST(AdapterRounding, KeepsTheTotalChangeOfDora) {
  const Tensor w = random_tensor("q.weight", {kRows, kCols}, 1);
  const Lora change = lora("q", kRows, kCols, 2);
  Tensor m{kPrefix + "q.lora_magnitude_vector", {kRows}, {}};
  for (std::size_t i = 0; i < kRows; ++i) {
    double squares = 0;
    for (std::size_t j = 0; j < kCols; ++j) {
      squares += double{w.values[i * kCols + j]} * w.values[i * kCols + j];
    }
    m.values.push_back(static_cast<float>(std::sqrt(squares) * (i % 2 == 0 ? 1.05 : 0.97)));
  }
  Case merge_case({w}, {{change.a, change.b, m}}, R"(, "use_dora": true)");
  const auto nearest = merge_case.merge(packed(kNf4, Rounding::kNearest));
  const auto adapter = merge_case.merge(packed(kNf4, Rounding::kAdapter));
  const Survival &before = nearest.at(0).survival, &after = adapter.at(0).survival;
  EXPECT_LT(after.error_along_adapter(), before.error_along_adapter() / 4);
  EXPECT_GT(after.kept(), before.kept() - 0.01);
  // The rows that only get longer or shorter are a part of what was meant, outside of V.
  EXPECT_LT(after.meant_along, 0.999 * after.intended);
}

TEST(AdapterRounding, GivesEachExpertItsOwnDirections) {
  const ThreeExperts experts;
  const auto& [w, a, b, config, adapter_config] = experts;
  Case merge_case({w}, {{a, b}}, adapter_config);
  for (const bool nested : {false, true}) {
    MergeSettings settings = packed(kNf4, Rounding::kNearest, nested);
    settings.experts = ExpertsOutput::kStack;
    const auto nearest = merge_case.merge(settings, 1, 1, config);
    const auto before = merge_case.output("m.mlp.experts.gate_up_proj");
    settings.rounding = Rounding::kAdapter;
    const auto adapter = merge_case.merge(settings, 2, 1, config);
    const auto after = merge_case.output("m.mlp.experts.gate_up_proj");
    EXPECT_LT(adapter.at(0).survival.error_along_adapter(),
              nearest.at(0).survival.error_along_adapter() / 4);
    ASSERT_EQ(after.size(), before.size());
    const auto third = static_cast<std::ptrdiff_t>(after.size() / 3);
    const auto same = [&](std::ptrdiff_t expert) {
      return std::equal(after.begin() + expert * third, after.begin() + (expert + 1) * third,
                        before.begin() + expert * third);
    };
    EXPECT_FALSE(same(0));
    EXPECT_TRUE(same(1));
    EXPECT_FALSE(same(2));
  }
}

}  // namespace
}  // namespace monograph
