#include <gtest/gtest.h>

#include <numeric>

#include "monograph/files/tests/temporary_folder.h"
#include "monograph/quant_methods/list_weights.h"
#include "monograph/quant_methods/tests/tensor_list.h"
#include "monograph/weights/experts.h"

namespace monograph {
namespace {

using files::TemporaryFolder;
using files::write_all;
using safetensors::Checkpoint;
using safetensors::StoredDType;

class Opened {
 public:
  explicit Opened(const TensorList& list, const std::string& config = R"({"hidden_size": 4})")
      : config_(json::parse(config, "config.json")) {
    write_all(folder_ / "model.safetensors", list.file());
    checkpoint_ = Checkpoint::open(folder_.path());
    weights = list_weights(checkpoint_, &config_);
    experts = stack_experts(weights, config_);
  }
  std::vector<Weight> weights;
  ExpertStacks experts;

 private:
  TemporaryFolder folder_;
  Checkpoint checkpoint_;
  json::Value config_;
};

std::string counted(float first, std::size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return bytes_of(values.data(), count);
}

std::vector<float> read(const Weight& weight) {
  std::vector<float> values(weight.elements);
  read_elements(weight, 0, weight.elements, DType::kFloat32, values.data());
  return values;
}

// Two experts of gate and up [3, 4] and down [4, 3].
TensorList one_by_one(const char* gate, const char* up, const char* down) {
  TensorList list;
  for (int e = 0; e < 2; ++e) {
    const std::string module = "m.experts." + std::to_string(e) + ".";
    const auto first = static_cast<float>(100 * e);
    list.add(module + gate + ".weight", StoredDType::kF32, {3, 4}, counted(first, 12));
    list.add(module + up + ".weight", StoredDType::kF32, {3, 4}, counted(first + 12, 12));
    list.add(module + down + ".weight", StoredDType::kF32, {4, 3}, counted(first + 24, 12));
  }
  return list;
}

TEST(Experts, NamesAreReadStrictly) {
  const auto name = parse_expert_name("model.layers.7.mlp.experts.12.w3.weight");
  ASSERT_TRUE(name);
  EXPECT_EQ(name->module, "model.layers.7.mlp.experts");
  EXPECT_EQ(name->expert, 12u);
  EXPECT_EQ(name->projection, "up");
  for (const char* other :
       {"model.layers.7.mlp.experts.weight", "m.experts.gate_proj.weight",
        "m.experts.1.gate_proj.bias", "m.experts.1.weight", "m.experts.-1.w1.weight",
        "m.experts.99999999999999999999.w1.weight", "m.experts..w1.weight",
        "m.shared_experts.1.w1.weight", "experts.1.w1.weight", ".experts.", ""}) {
    EXPECT_FALSE(parse_expert_name(other)) << other;
  }
}

TEST(Experts, GateStandsBeforeUpInEachExpert) {
  for (const TensorList& list :
       {one_by_one("gate_proj", "up_proj", "down_proj"), one_by_one("w1", "w3", "w2")}) {
    const Opened opened(list);
    ASSERT_EQ(opened.experts.stacks.size(), 2u);
    EXPECT_EQ(opened.experts.members.size(), 6u);
    const Weight &down = opened.experts.stacks[0], &gate_up = opened.experts.stacks[1];
    EXPECT_EQ(gate_up.name, "m.experts.gate_up_proj");
    EXPECT_EQ(gate_up.shape, (std::vector<std::uint64_t>{2, 6, 4}));
    EXPECT_EQ(down.shape, (std::vector<std::uint64_t>{2, 4, 3}));
    const std::vector<float> values = read(gate_up);
    for (std::size_t i = 0; i < 48; ++i) {
      EXPECT_EQ(values[i], static_cast<float>(i < 24 ? i : 100 + i - 24));
    }
  }
}

TEST(Experts, EveryRangeOfATransposedStackIsThePartOfTheWhole) {
  TensorList list;
  // [experts, inputs, outputs]; 130 outputs: more than are gathered at once.
  list.add("m.experts.gate_up_proj", StoredDType::kF32, {2, 4, 130}, counted(0, 1040));
  const Opened opened(list, R"({"hidden_size": 4, "model_type": "gpt_oss"})");
  ASSERT_EQ(opened.experts.stacks.size(), 1u);
  const Weight& stack = opened.experts.stacks[0];
  EXPECT_EQ(stack.shape, (std::vector<std::uint64_t>{2, 130, 4}));
  std::vector<float> part(1040);
  for (std::size_t begin = 0; begin < 1040; begin += 41) {
    for (std::size_t end = begin; end <= 1040; end += 67) {
      read_elements(stack, begin, end, DType::kFloat32, part.data());
      for (std::size_t i = begin; i < end; ++i) {
        const std::size_t e = i / 520, out = i % 520 / 4, in = i % 4;
        ASSERT_EQ(part[i - begin], static_cast<float>(e * 520 + in * 130 + out));
      }
    }
  }
  EXPECT_EQ(read(transposed(stack)), read(opened.weights[0]));
}

TEST(Experts, WhichWayAStackLiesIsToldByHiddenSizeOrTheModel) {
  const auto order = [](std::vector<std::uint64_t> shape, const char* name, const char* config) {
    Weight weight;
    weight.name = name;
    weight.quant_method = "plain";
    weight.shape = std::move(shape);
    return order_of(weight, json::parse(config, "config.json"));
  };
  using enum StackOrder;
  const char *plain = R"({"hidden_size": 4})",
             *gpt = R"({"hidden_size": 4, "model_type": "gpt_oss"})";
  EXPECT_EQ(order({2, 6, 4}, "m.experts.gate_up_proj", plain), kOutputsFirst);
  EXPECT_EQ(order({2, 4, 6}, "m.experts.gate_up_proj", plain), kInputsFirst);
  EXPECT_EQ(order({2, 4, 3}, "m.experts.down_proj", plain), kOutputsFirst);
  EXPECT_EQ(order({2, 3, 4}, "m.experts.down_proj", gpt), kInputsFirst);
  EXPECT_EQ(order({2, 4, 4}, "m.experts.down_proj", plain), kOutputsFirst);
  EXPECT_EQ(order({2, 4, 4}, "m.experts.down_proj", gpt), kInputsFirst);
  EXPECT_EQ(order({2, 3, 5}, "m.experts.down_proj", plain), std::nullopt);
  EXPECT_EQ(order({2, 4, 3}, "m.experts.down_proj", "{}"), std::nullopt);
  EXPECT_EQ(order({2, 4, 3}, "m.experts.down_proj", R"({"text_config": {"hidden_size": 4}})"),
            kOutputsFirst);
  EXPECT_EQ(order({2, 4, 3}, "m.experts.down_proj", R"({"hidden_size": "4", "text_config": 3})"),
            std::nullopt);
}

TEST(Experts, WhatFitsInNoStackIsNamed) {
  const auto why = [](TensorList list) {
    const Opened opened(list);
    EXPECT_TRUE(opened.experts.stacks.empty());
    return opened.experts.refused.empty() ? "" : opened.experts.refused.begin()->second;
  };
  const TensorList whole = one_by_one("gate_proj", "up_proj", "down_proj");
  TensorList list = whole;
  list.remove("m.experts.0.up_proj.weight");
  EXPECT_EQ(why(list), "up has 1 experts up to number 1, down has 2");
  list = whole;
  list.add("m.experts.0.w1.weight", StoredDType::kF32, {3, 4});
  EXPECT_EQ(why(list), "'m.experts.0.w1.weight' is there twice");
  list = whole;
  list.add("m.experts.0.gate_proj.bias", StoredDType::kF32, {3});
  EXPECT_NE(why(list).find("'m.experts.0.gate_proj.bias' is none of"), std::string::npos);
  list = whole;
  list.at("m.experts.1.down_proj.weight").shape = {3, 4};
  EXPECT_NE(why(list).find("'m.experts.1.down_proj.weight' is fp32 [3, 4]"), std::string::npos);
  list = whole;
  for (int e = 0; e < 2; ++e) list.remove("m.experts." + std::to_string(e) + ".up_proj.weight");
  EXPECT_EQ(why(list), "wanted gate, up and down of each expert, or up and down");
}

TEST(Experts, HowAModelHasThemFollowsFromItsType) {
  const auto layout = [](const char* config) {
    return find_expert_layout(json::parse(config, "config.json"));
  };
  ASSERT_NE(layout(R"({"model_type": "gpt_oss"})"), nullptr);
  EXPECT_EQ(layout(R"({"model_type": "gpt_oss"})")->gate_up, GateUp::kInterleaved);
  EXPECT_EQ(layout(R"({"model_type": "gpt_oss"})")->modules, ExpertModules::kNone);
  EXPECT_EQ(layout(R"({"model_type": "x", "text_config": {"model_type": "llama4_text"}})")->modules,
            ExpertModules::kNone);
  EXPECT_EQ(layout(R"({"model_type": "mixtral", "text_config": null})")->modules,
            ExpertModules::kW1W3W2);
  EXPECT_EQ(layout(R"({"model_type": "llama"})"), nullptr);
  EXPECT_EQ(expert_leaf(ExpertModules::kW1W3W2, "up"), "w3");
  EXPECT_EQ(expert_leaf(ExpertModules::kGateUpDown, "gate"), "gate_proj");
}

TEST(Experts, OneByOneThereIsNoStackOfAModelThatInterleavesGateAndUp) {
  const Opened opened(one_by_one("gate_proj", "up_proj", "down_proj"),
                      R"({"hidden_size": 4, "model_type": "gpt_oss"})");
  EXPECT_TRUE(opened.experts.stacks.empty());
  EXPECT_EQ(opened.experts.refused.at("m.experts"),
            "experts are stored one by one, and model_type 'gpt_oss' has them in a stack");
}

TEST(Experts, AParameterIsFoundByTheNamesThatFilesHaveForIt) {
  TensorList list;
  list.add("l.0.block_sparse_moe.input_linear.weight", StoredDType::kF32, {2, 6, 4});
  list.add("l.1.feed_forward.experts.down_proj", StoredDType::kF32, {2, 4, 3});
  const Opened opened(list);
  const ExpertStacks& experts = opened.experts;
  ASSERT_NE(experts.find("l.0.block_sparse_moe.experts", "gate_up_proj"), nullptr);
  EXPECT_EQ(experts.find("l.0.block_sparse_moe.experts", "down_proj"), nullptr);
  ASSERT_NE(experts.find("l.1.mlp.experts", "down_proj"), nullptr);
  EXPECT_EQ(experts.find("l.1.mlp.experts", "down_proj"),
            experts.find("l.1.feed_forward.experts", "down_proj"));
  using Names = std::vector<std::string>;
  EXPECT_EQ(parameter_names("l.0.block_sparse_moe.input_linear.weight"),
            (Names{"l.0.block_sparse_moe.experts.gate_up_proj", "l.0.mlp.experts.gate_up_proj"}));
  EXPECT_EQ(parameter_names("l.0.block_sparse_moe.experts.3.w3.weight"),
            (Names{"l.0.block_sparse_moe.experts.gate_up_proj", "l.0.mlp.experts.gate_up_proj",
                   "l.0.block_sparse_moe.experts.up_proj", "l.0.mlp.experts.up_proj"}));
  EXPECT_EQ(parameter_names("l.1.mlp.up_proj.weight"), Names{});
}

}  // namespace
}  // namespace monograph
