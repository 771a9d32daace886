// Merges of small weights against a few obvious lines in fp64, and the plan's refusals. Real
// adapters of PEFT are in tests/python/native/test_merge.py.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "monograph/merge/round.h"
#include "monograph/merge/tests/merge_case.h"
#include "monograph/quant_methods/list_weights.h"

namespace monograph {
namespace {

using namespace files;
using namespace safetensors;

template <class T>
std::vector<std::uint8_t> bytes_of(const std::vector<T>& values) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}

TEST(Merge, LoraIsTheRoundedSumInEveryTypeAndForAnyThreads) {
  const Tensor w = random_tensor("m.q.weight", {300, 500}, 1);
  const Tensor a = random_tensor(kPrefix + "m.q.lora_A.weight", {2, 500}, 2);
  const Tensor b = random_tensor(kPrefix + "m.q.lora_B.weight", {300, 2}, 3);
  Case merge_case({w, random_tensor("m.norm.weight", {7}, 4)}, {{a, b}}, "");
  std::vector<Bf16> bf16;
  std::vector<Fp16> fp16;
  std::vector<float> fp32;
  for (std::size_t i = 0; i < 300; ++i) {
    for (std::size_t j = 0; j < 500; ++j) {
      const double value = double{w.values[i * 500 + j]} + delta(a, b, i, j, 1.5);
      bf16.push_back(round_to<Bf16>(value));
      fp16.push_back(round_to<Fp16>(value));
      fp32.push_back(static_cast<float>(value));
    }
  }
  for (const int threads : {1, 2, 3}) {
    merge_case.merge(to(DType::kBFloat16), threads);
    EXPECT_EQ(merge_case.output("m.q.weight"), bytes_of(bf16));
    merge_case.merge(to(DType::kFloat16), threads);
    EXPECT_EQ(merge_case.output("m.q.weight"), bytes_of(fp16));
    merge_case.merge({}, threads);
    EXPECT_EQ(merge_case.output("m.q.weight"), bytes_of(fp32));
  }
}

TEST(Merge, SeveralAdaptersAddUpWithTheirWeights) {
  const Tensor w = random_tensor("q.weight", {5, 6}, 1);
  const Tensor a0 = random_tensor(kPrefix + "q.lora_A.weight", {2, 6}, 2);
  const Tensor b0 = random_tensor(kPrefix + "q.lora_B.weight", {5, 2}, 3);
  const Tensor a1 = random_tensor(kPrefix + "q.lora_A.weight", {2, 6}, 4);
  const Tensor b1 = random_tensor(kPrefix + "q.lora_B.weight", {5, 2}, 5);
  Case merge_case({w}, {{a0, b0}, {a1, b1}}, "");
  merge_case.merge({}, 1, 0.25);
  std::vector<float> wanted;
  for (std::size_t i = 0; i < 5; ++i) {
    for (std::size_t j = 0; j < 6; ++j) {
      const double first = w.values[i * 6 + j] + delta(a0, b0, i, j, 1.5 * 0.25);
      wanted.push_back(static_cast<float>(first + delta(a1, b1, i, j, 1.5 * 0.25)));
    }
  }
  EXPECT_EQ(merge_case.output("q.weight"), bytes_of(wanted));
}

TEST(Merge, DoraScalesRowsAndOfEmbeddingsColumns) {
  const Tensor w = random_tensor("q.weight", {5, 40}, 1);
  const Tensor a = random_tensor(kPrefix + "q.lora_A.weight", {2, 40}, 2);
  const Tensor b = random_tensor(kPrefix + "q.lora_B.weight", {5, 2}, 3);
  Tensor m = random_tensor(kPrefix + "q.lora_magnitude_vector", {5}, 4);
  const Tensor e = random_tensor("embed_tokens.weight", {700, 8}, 5);
  const Tensor ea = random_tensor(kPrefix + "embed_tokens.lora_embedding_A", {2, 700}, 6);
  const Tensor eb = random_tensor(kPrefix + "embed_tokens.lora_embedding_B", {8, 2}, 7);
  const Tensor em = random_tensor(kPrefix + "embed_tokens.lora_magnitude_vector", {8}, 8);
  Case merge_case({w, e, random_tensor("lm_head.weight", {3}, 9)}, {{a, b, m, ea, eb, em}},
                  R"(, "use_dora": true)");
  merge_case.merge({});
  const auto check = [&](const std::string& name, auto&& value, const Tensor& magnitude,
                         std::size_t outputs, std::size_t inputs, bool transposed) {
    const std::vector<std::uint8_t> bytes = merge_case.output(name);
    for (std::size_t o = 0; o < outputs; ++o) {
      double squares = 0;
      for (std::size_t i = 0; i < inputs; ++i) squares += value(o, i) * value(o, i);
      for (std::size_t i = 0; i < inputs; ++i) {
        const double wanted = magnitude.values[o] / std::sqrt(squares) * value(o, i);
        float found;
        const std::size_t at = transposed ? i * outputs + o : o * inputs + i;
        std::memcpy(&found, bytes.data() + 4 * at, 4);
        // The order of the sum of squares is another one here: at most one unit in the last place.
        ASSERT_NEAR(found, wanted, std::fabs(wanted) * 0x1p-23) << name << " " << o << " " << i;
      }
    }
  };
  check(
      "q.weight",
      [&](std::size_t o, std::size_t i) { return w.values[o * 40 + i] + delta(a, b, o, i, 1.5); },
      m, 5, 40, false);
  check(
      "embed_tokens.weight",
      [&](std::size_t o, std::size_t i) { return e.values[i * 8 + o] + delta(ea, eb, o, i, 1.5); },
      em, 8, 700, true);
}

TEST(Merge, ReplacementsTokensAndBiases) {
  const Tensor w = random_tensor("q.weight", {5, 6}, 1), bias = random_tensor("q.bias", {5}, 2);
  const Tensor e = random_tensor("embed_tokens.weight", {9, 6}, 3);
  const Tensor a = random_tensor(kPrefix + "q.lora_A.weight", {2, 6}, 4);
  const Tensor b = random_tensor(kPrefix + "q.lora_B.weight", {5, 2}, 5);
  const Tensor lora_bias = random_tensor(kPrefix + "q.lora_B.bias", {5}, 6);
  const Tensor norm = random_tensor(kPrefix + "norm.weight", {6}, 7);
  const Tensor rows =
      random_tensor(kPrefix + "embed_tokens.token_adapter.trainable_tokens_delta", {2, 6}, 8);
  Case merge_case({w, bias, e, random_tensor("norm.weight", {6}, 9)},
                  {{a, b, lora_bias, norm, rows}},
                  R"(, "lora_bias": true, "trainable_token_indices": [8, 3])");
  const std::vector<MergeRow> report = merge_case.merge({});
  EXPECT_EQ(merge_case.output("norm.weight"), bytes_of(norm.values));
  std::vector<float> wanted = e.values, wanted_bias;
  for (std::size_t j = 0; j < 6; ++j) {
    wanted[8 * 6 + j] = rows.values[j];
    wanted[3 * 6 + j] = rows.values[6 + j];
  }
  EXPECT_EQ(merge_case.output("embed_tokens.weight"), bytes_of(wanted));
  for (std::size_t i = 0; i < 5; ++i) {
    wanted_bias.push_back(static_cast<float>(bias.values[i] + 1.5 * lora_bias.values[i]));
  }
  EXPECT_EQ(merge_case.output("q.bias"), bytes_of(wanted_bias));
  ASSERT_EQ(report.size(), 4u);
  EXPECT_EQ(report[0].change, "tokens");
  EXPECT_EQ(report[1].change, "replaced");
  EXPECT_EQ(report[2].change, "bias");
  EXPECT_EQ(report[3].change, "lora");
}

TEST(Merge, FanInFanOutIsTransposed) {
  const Tensor w = random_tensor("c.weight", {6, 5}, 1);
  const Tensor a = random_tensor(kPrefix + "c.lora_A.weight", {2, 6}, 2);
  const Tensor b = random_tensor(kPrefix + "c.lora_B.weight", {5, 2}, 3);
  Case merge_case({w}, {{a, b}}, R"(, "fan_in_fan_out": true)");
  merge_case.merge({});
  std::vector<float> wanted;
  for (std::size_t i = 0; i < 6; ++i) {
    for (std::size_t o = 0; o < 5; ++o) {
      wanted.push_back(static_cast<float>(w.values[i * 5 + o] + delta(a, b, o, i, 1.5)));
    }
  }
  EXPECT_EQ(merge_case.output("c.weight"), bytes_of(wanted));
}

TEST(Merge, TheReportMeasuresWhatTheTypeKeeps) {
  Tensor w = random_tensor("q.weight", {64, 64}, 1);
  for (float& value : w.values) value = to_float(from_float<Bf16>(value));
  Tensor a = random_tensor(kPrefix + "q.lora_A.weight", {2, 64}, 2);
  const Tensor b = random_tensor(kPrefix + "q.lora_B.weight", {64, 2}, 3);
  Case large({w}, {{a, b}}, "");
  EXPECT_GT(large.merge({})[0].survival.cosine(), 1 - 1e-9);  // fp32 keeps it
  const Survival kept = large.merge(to(DType::kBFloat16))[0].survival;
  EXPECT_GT(kept.cosine(), 0.99);
  for (float& value : a.values) value *= 1e-3f;
  Case small({w}, {{a, b}}, "");
  const Survival lost = small.merge(to(DType::kBFloat16))[0].survival;
  EXPECT_LT(lost.cosine(), 0.5);  // below half a unit of most weights
  EXPECT_NEAR(lost.intended_norm() / kept.intended_norm(), 1e-3, 1e-6);
  for (float& value : a.values) value = 0;
  Case none({w}, {{a, b}}, "");
  EXPECT_EQ(none.merge(to(DType::kBFloat16))[0].survival.cosine(), 1);
}

TEST(Merge, FourBitsLoseASmallChange) {
  const Tensor w = random_tensor("m.q.weight", {96, 100}, 1);  // blocks straddle rows
  Tensor a = random_tensor(kPrefix + "m.q.lora_A.weight", {2, 100}, 2);
  const Tensor b = random_tensor(kPrefix + "m.q.lora_B.weight", {96, 2}, 3);
  for (float& value : a.values) value *= 0.1f;
  Case merge_case({w}, {{a, b}}, "");
  for (const bool double_quant : {false, true}) {
    MergeSettings settings;
    settings.format = Format::kNf4;
    settings.double_quant = double_quant;
    const Survival survival = merge_case.merge(settings, 2)[0].survival;
    EXPECT_LT(survival.cosine(), 0.3);
    EXPECT_GT(survival.realised_norm(), 2 * survival.intended_norm());  // noise, not the change
    // The report is that of the bytes: the file read back gives the same figures.
    const Checkpoint out = Checkpoint::open(merge_case.folder() / "out");
    const std::vector<Weight> weights = list_weights(out);
    ASSERT_EQ(weights.size(), 1u);
    EXPECT_EQ(weights[0].format, "nf4");
    EXPECT_EQ(weights[0].double_quant, double_quant);
    std::vector<float> values(9600);
    read_elements(weights[0], 0, 9600, DType::kFloat32, values.data());
    Survival wanted;
    for (std::size_t i = 0; i < 9600; ++i) {
      const double meant = delta(a, b, i / 100, i % 100, 1.5);
      const double found = double{values[i]} - w.values[i];
      wanted.realised += found * found;
      wanted.product += meant * found;
    }
    EXPECT_NEAR(survival.realised, wanted.realised, 1e-9 * wanted.realised);
    EXPECT_NEAR(survival.product, wanted.product, 1e-9 * wanted.realised);
  }
}

TEST(Merge, ABaseLoadedInFourBitsIsTheOneThatWasTrainedOn) {
  const Tensor w = random_tensor("m.q.weight", {96, 100}, 1),
               n = random_tensor("norm.weight", {7}, 4);
  const Tensor other = random_tensor("m.k.weight", {10, 64}, 5);
  const Tensor a = random_tensor(kPrefix + "m.q.lora_A.weight", {2, 100}, 2);
  const Tensor b = random_tensor(kPrefix + "m.q.lora_B.weight", {96, 2}, 3);
  Case quantised({w, n, other}, {{a, b}}, "");
  MergeSettings settings;
  settings.format = Format::kFp4;
  settings.block = 128;
  MergePlan plan = quantised.plan(settings);
  for (MergedWeight& weight : plan.weights) weight.low_rank.clear();  // the base alone, packed
  std::filesystem::create_directory(quantised.folder() / "packed");
  {
    ShardedWriter writer(quantised.folder() / "packed", plan_shards(plan.specs(), {}, 1 << 30));
    run_merge(plan, writer, serial_for, [](std::uint64_t) {});
    writer.finish();
  }
  MergeSettings onto;
  onto.base_as = Format::kFp4;
  onto.base_block = 128;
  quantised.merge(onto, 3);
  const Checkpoint packed = Checkpoint::open(quantised.folder() / "packed");
  for (const Weight& weight : list_weights(packed)) {
    std::vector<float> wanted(weight.elements);
    read_elements(weight, 0, weight.elements, DType::kFloat32, wanted.data());
    if (weight.name == "m.q.weight") {
      for (std::size_t i = 0; i < 9600; ++i) {
        wanted[i] = static_cast<float>(wanted[i] + delta(a, b, i / 100, i % 100, 1.5));
      }
    }
    EXPECT_EQ(quantised.output(weight.name), bytes_of(wanted)) << weight.name;
  }
}

TEST(Merge, BrokenNumbersAreErrors) {
  const Tensor w = random_tensor("q.weight", {5, 6}, 1);
  const Tensor a = random_tensor(kPrefix + "q.lora_A.weight", {2, 6}, 2);
  Tensor b = random_tensor(kPrefix + "q.lora_B.weight", {5, 2}, 3);
  b.values[6] = INFINITY;
  Case merge_case({w}, {{a, b}}, "");
  EXPECT_NE(error_of([&] { merge_case.merge({}); }).find("row 3, column 0"), std::string::npos);
}

TEST(MergePlan, RefusesWhatDoesNotFitTheBase) {
  const Tensor w = random_tensor("q.weight", {5, 6}, 1);
  const Tensor a = random_tensor(kPrefix + "q.lora_A.weight", {2, 6}, 2);
  const Tensor b = random_tensor(kPrefix + "q.lora_B.weight", {5, 2}, 3);
  const Tensor b4 = random_tensor(kPrefix + "q.lora_B.weight", {4, 2}, 3);
  const Tensor bias = random_tensor(kPrefix + "q.lora_B.bias", {5}, 4);
  const Tensor m = random_tensor(kPrefix + "q.lora_magnitude_vector", {5}, 4);
  const Tensor q = random_tensor(kPrefix + "q.base_layer.weight", {5, 6}, 4);
  const Tensor elsewhere = random_tensor(kPrefix + "x.weight", {5, 6}, 4);
  const auto refused = [](Case merge_case, const char* message, double weight = 1) {
    const std::string error = error_of([&] { merge_case.plan({}, weight); });
    EXPECT_NE(error.find(message), std::string::npos) << error;
  };
  refused(Case({random_tensor("p.weight", {5, 6}, 1)}, {{a, b}}, ""), "no such weight");
  refused(Case({w}, {{a, b4}}, ""), "B * A has shape [4, 6], the weight has [5, 6]");
  refused(Case({w}, {{a, b, bias}}, R"(, "lora_bias": true)"), "has no bias");
  refused(Case({w}, {{a, b, m}, {a, b, m}}, R"(, "use_dora": true)"), "not all of them are plain");
  refused(Case({w}, {{a, b, m}}, R"(, "use_dora": true)"), "DoRA cannot be weighted", 0.5);
  refused(Case({w}, {{q}}, ""), "cannot be weighted", 2);
  refused(Case({w}, {{q}, {q}}, ""), "another adapter changes it too");
  refused(Case({w}, {{q}, {a, b}}, ""), "not all of them are plain");
  refused(Case({w}, {{elsewhere}}, ""), "no such weight");
  refused(Case({w}, {{random_tensor(kPrefix + "q.weight", {5, 7}, 1)}}, ""), "the base has [5, 6]");
  Case({w}, {{q, a, b}}, "").plan();  // PEFT saves the base beside the LoRA of an embedding
}

TEST(MergePlan, TiedHeads) {
  const Tensor e = random_tensor("m.embed_tokens.weight", {9, 6}, 1);
  const Tensor ea = random_tensor(kPrefix + "m.embed_tokens.lora_embedding_A", {2, 9}, 2);
  const Tensor eb = random_tensor(kPrefix + "m.embed_tokens.lora_embedding_B", {6, 2}, 3);
  const Tensor ha = random_tensor(kPrefix + "lm_head.lora_A.weight", {2, 6}, 4);
  const Tensor hb = random_tensor(kPrefix + "lm_head.lora_B.weight", {9, 2}, 5);
  const Tensor rows =
      random_tensor(kPrefix + "m.embed_tokens.token_adapter.trainable_tokens_delta", {1, 6}, 6);
  const std::string tied = R"({"tie_word_embeddings": true, "architectures": ["XForCausalLM"]})";
  const auto names = [](const MergePlan& plan) {
    std::string text;
    for (const MergedWeight& weight : plan.weights) {
      text += weight.name + (weight.is_changed() ? "* " : " ");
    }
    return text;
  };
  Case on_embedding({e}, {{ea, eb}}, "");
  EXPECT_EQ(names(on_embedding.plan({}, 1, tied)), "lm_head.weight m.embed_tokens.weight* ");
  EXPECT_TRUE(on_embedding.plan({}, 1, tied).unties_head);
  Case on_head({e}, {{ha, hb}}, "");
  EXPECT_EQ(names(on_head.plan({}, 1, tied)), "lm_head.weight* m.embed_tokens.weight ");
  EXPECT_TRUE(on_head.plan({}, 1, tied).unties_head);
  Case kept({e}, {{ea, eb}}, R"(, "ensure_weight_tying": true)");
  EXPECT_EQ(names(kept.plan({}, 1, tied)), "m.embed_tokens.weight* ");
  EXPECT_FALSE(kept.plan({}, 1, tied).unties_head);
  Case tokens({e}, {{rows}}, R"(, "trainable_token_indices": [2])");
  EXPECT_FALSE(tokens.plan({}, 1, tied).unties_head);
  // A model without a head: nothing to untie.
  EXPECT_FALSE(on_embedding.plan({}, 1, R"({"architectures": ["XModel"]})").unties_head);
  const MergePlan plan = on_head.plan({}, 1, tied);
  const json::Value config =
      merged_config(json::parse(R"({"tie_word_embeddings": true, "quantization_config": {"a": 1},
                                    "dtype": "float32", "text_config": {"torch_dtype": "float16"}})",
                                "test"),
                    plan, to(DType::kBFloat16));
  EXPECT_EQ(json::dump_line(config),
            R"({"tie_word_embeddings": false, "dtype": "bfloat16", "text_config": )"
            R"({"torch_dtype": "bfloat16", "tie_word_embeddings": false}})");
}

}  // namespace
}  // namespace monograph
