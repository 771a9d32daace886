#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "monograph/base/float_types.h"
#include "monograph/files/tests/temporary_folder.h"
#include "monograph/quant_methods/list_weights.h"
#include "monograph/quant_methods/tests/tensor_list.h"
#include "monograph/safetensors/tests/hostile_files.h"
#include "monograph/weights/weight.h"

namespace monograph {
namespace {

using files::TemporaryFolder;
using files::write_all;
using safetensors::Checkpoint;
using safetensors::HostileCase;
using safetensors::StoredDType;

class Opened {
 public:
  explicit Opened(const TensorList& list, const std::string& config = "{}")
      : config_(json::parse(config, "config.json")) {
    write_all(folder_ / "model.safetensors", list.file());
    checkpoint_ = Checkpoint::open(folder_.path());
    weights = list_weights(checkpoint_, &config_);
  }
  std::vector<Weight> weights;

 private:
  TemporaryFolder folder_;
  Checkpoint checkpoint_;
  json::Value config_;
};

TEST(Weights, DecodesANestedWeightByTheFormula) {
  const Opened opened(nested_weight());
  ASSERT_EQ(opened.weights.size(), 1u);
  const Weight& weight = opened.weights[0];
  EXPECT_EQ(weight.name, "w.weight");
  EXPECT_EQ(weight.format, "nf4");
  EXPECT_TRUE(weight.double_quant);
  EXPECT_EQ(weight.dtype, StoredDType::kBF16);
  EXPECT_EQ(weight.shape, (std::vector<std::uint64_t>{4, 96}));
  EXPECT_EQ(weight.parts.size(), 6u);
  std::vector<float> out(384);
  read_elements(weight, 0, 384, DType::kFloat32, out.data());
  const std::array<unsigned, 6> codes = {0x00, 0x40, 0x80, 0xc0, 0xf0, 0xff};
  for (std::size_t i = 0; i < 384; ++i) {
    const float product = kDynamicMap[codes[i / 64]] * 2.0f;
    const float scale = product + 0.5f;
    EXPECT_EQ(out[i], Nf4::kValues[i % 2 == 0 ? 3 : 12] * scale) << i;
  }
}

TEST(Weights, EveryRangeGivesThePartOfTheWhole) {
  const Opened opened(plain_scales_weight());
  const Weight& weight = opened.weights[0];
  EXPECT_EQ(weight.dtype, StoredDType::kF16);
  std::vector<std::uint16_t> whole(384), part(384);
  read_elements(weight, 0, 384, DType::kBFloat16, whole.data());
  for (std::size_t begin = 0; begin < 384; begin += 13) {
    for (std::size_t end = begin; end <= 384; end += 31) {
      read_elements(weight, begin, end, DType::kBFloat16, part.data());
      EXPECT_TRUE(std::equal(part.begin(), part.begin() + static_cast<long>(end - begin),
                             whole.begin() + static_cast<long>(begin)));
    }
  }
}

TEST(Weights, ReadsPlainFloatsOfEveryWidth) {
  TensorList list;
  const std::array<float, 3> f32 = {1.5f, -0.1f, INFINITY};
  const std::array<double, 3> f64 = {1.5, -0.1, 1e300};
  const std::array<std::uint16_t, 3> f16 = {0x3e00, 0xae66, 0x7c00},
                                     bf16 = {0x3fc0, 0xbdcd, 0x7f80};
  list.add("a", StoredDType::kF32, {3}, bytes_of(f32.data(), 3));
  list.add("b", StoredDType::kF64, {3}, bytes_of(f64.data(), 3));
  list.add("c", StoredDType::kF16, {3}, bytes_of(f16.data(), 3));
  list.add("d", StoredDType::kBF16, {3}, bytes_of(bf16.data(), 3));
  list.add("e", StoredDType::kI64, {3});
  list.add("scalar", StoredDType::kF32, {}, bytes_of(f32.data(), 1));
  const Opened opened(list);
  for (std::size_t i = 0; i < 4; ++i) {
    std::array<float, 3> out{};
    read_elements(opened.weights[i], 0, 3, DType::kFloat32, out.data());
    EXPECT_EQ(out[0], 1.5f);
    EXPECT_NEAR(out[1], -0.1f, 5e-4);
    EXPECT_TRUE(std::isinf(out[2])) << i;
    std::array<Bf16, 3> half{};
    read_elements(opened.weights[i], 1, 2, DType::kBFloat16, half.data());
    EXPECT_NEAR(to_float(half[0]), -0.1f, 5e-4);
  }
  EXPECT_FALSE(opened.weights[4].is_readable());
  EXPECT_EQ(opened.weights[4].format, "i64");
  EXPECT_EQ(opened.weights[5].elements, 1u);
  EXPECT_NE(files::error_of([&] {
              std::array<float, 3> out{};
              read_elements(opened.weights[4], 0, 3, DType::kFloat32, out.data());
            }).find("cannot decode i64"),
            std::string::npos);
}

struct Known {
  std::string name, format, quant_method;
  std::vector<TestTensor> tensors;
  std::vector<std::uint64_t> shape, block;
};

TEST(Weights, RecognisesEveryProducer) {
  using T = StoredDType;
  const std::vector<Known> known = {
      {"w.weight",
       "fp8-block",
       "DeepSeek",
       {{"w.weight", T::kF8E4M3, {300, 256}, ""}, {"w.weight_scale_inv", T::kF32, {3, 2}, ""}},
       {300, 256},
       {128, 128}},
      {"w.weight",
       "fp8-block",
       "compressed-tensors",
       {{"w.weight", T::kF8E4M3, {256, 256}, ""}, {"w.weight_scale", T::kBF16, {2, 2}, ""}},
       {256, 256},
       {128, 128}},
      {"w.weight",
       "mxfp8",
       "compressed-tensors",
       {{"w.weight", T::kF8E4M3, {4, 64}, ""}, {"w.weight_scale", T::kU8, {4, 2}, ""}},
       {4, 64},
       {1, 32}},
      {"w.weight",
       "fp8",
       "compressed-tensors",
       {{"w.weight", T::kF8E4M3, {4, 64}, ""}, {"w.weight_scale", T::kF32, {4, 1}, ""}},
       {4, 64},
       {1, 64}},
      {"w.weight",
       "fp8",
       "compressed-tensors",
       {{"w.weight", T::kF8E4M3, {400, 640}, ""},
        {"w.weight_scale", T::kF32, {}, ""},
        {"w.input_scale", T::kF32, {}, ""}},
       {400, 640},
       {400, 640}},
      {"w.weight",
       "int8",
       "compressed-tensors",
       {{"w.weight", T::kI8, {4, 64}, ""},
        {"w.weight_scale", T::kBF16, {4, 1}, ""},
        {"w.weight_zero_point", T::kI8, {4, 1}, ""}},
       {4, 64},
       {1, 64}},
      {"w.weight",
       "int4",
       "compressed-tensors",
       {{"w.weight_packed", T::kI32, {9, 63}, ""},
        {"w.weight_scale", T::kF16, {9, 25}, ""},
        {"w.weight_zero_point", T::kI32, {2, 25}, ""},
        {"w.weight_shape",
         T::kI64,
         {2},
         std::string("\x09\0\0\0\0\0\0\0\xf4\x01\0\0\0\0\0\0", 16)}},
       {9, 500},
       {1, 20}},
      {"w.weight",
       "int8",
       "compressed-tensors",
       {{"w.weight_packed", T::kI32, {9, 125}, ""},
        {"w.weight_scale", T::kF32, {9, 1}, ""},
        {"w.weight_shape",
         T::kI64,
         {2},
         std::string("\x09\0\0\0\0\0\0\0\xf4\x01\0\0\0\0\0\0", 16)}},
       {9, 500},
       {1, 500}},
      {"w.weight",
       "int-packed",
       "compressed-tensors",
       {{"w.weight_packed", T::kI32, {9, 47}, ""},
        {"w.weight_scale", T::kF32, {9, 1}, ""},
        {"w.weight_shape",
         T::kI64,
         {2},
         std::string("\x09\0\0\0\0\0\0\0\xf4\x01\0\0\0\0\0\0", 16)}},
       {9, 500},
       {1, 500}},
      {"w.weight",
       "int-g_idx",
       "compressed-tensors",
       {{"w.weight_packed", T::kI32, {9, 63}, ""},
        {"w.weight_scale", T::kF16, {9, 25}, ""},
        {"w.weight_g_idx", T::kI32, {500}, ""},
        {"w.weight_shape",
         T::kI64,
         {2},
         std::string("\x09\0\0\0\0\0\0\0\xf4\x01\0\0\0\0\0\0", 16)}},
       {9, 500},
       {1, 20}},
      {"w.weight",
       "mxfp4",
       "compressed-tensors",
       {{"w.weight_packed", T::kU8, {4, 32}, ""}, {"w.weight_scale", T::kU8, {4, 2}, ""}},
       {4, 64},
       {1, 32}},
      {"w.weight",
       "nvfp4",
       "compressed-tensors",
       {{"w.weight_packed", T::kU8, {4, 32}, ""},
        {"w.weight_scale", T::kF8E4M3, {4, 4}, ""},
        {"w.weight_global_scale", T::kF32, {1}, ""},
        {"w.input_global_scale", T::kF32, {1}, ""}},
       {4, 64},
       {1, 16}},
      {"w.weight",
       "nvfp4",
       "ModelOpt",
       {{"w.weight", T::kU8, {4, 32}, ""},
        {"w.weight_scale", T::kF8E4M3, {4, 4}, ""},
        {"w.weight_scale_2", T::kF32, {}, ""}},
       {4, 64},
       {1, 16}},
      {"e.gate_up_proj",
       "mxfp4",
       "gpt-oss",
       {{"e.gate_up_proj_blocks", T::kU8, {2, 6, 3, 16}, ""},
        {"e.gate_up_proj_scales", T::kU8, {2, 6, 3}, ""}},
       {2, 6, 96},
       {1, 32}},
      {"w",
       "mxfp4",
       "gpt-oss",
       {{"w.blocks", T::kU8, {2, 6, 3, 16}, ""}, {"w.scales", T::kU8, {2, 6, 3}, ""}},
       {2, 6, 96},
       {1, 32}},
      {"w.weight",
       "mxfp4",
       "DeepSeek",
       {{"w.weight", T::kI8, {4, 32}, ""}, {"w.weight_scale_inv", T::kF8E8M0, {4, 2}, ""}},
       {4, 64},
       {1, 32}},
      {"w.weight",
       "int8",
       "bitsandbytes",
       {{"w.weight", T::kI8, {4, 8}, ""},
        {"w.SCB", T::kF32, {4}, ""},
        {"w.weight_format", T::kU8, {}, ""}},
       {4, 8},
       {1, 8}},
  };
  for (const Known& row : known) {
    TensorList list;
    for (const TestTensor& tensor : row.tensors)
      list.add(tensor.name, tensor.dtype, tensor.shape, tensor.bytes);
    const Opened opened(list);
    ASSERT_EQ(opened.weights.size(), 1u) << row.format << " " << row.quant_method;
    const Weight& weight = opened.weights[0];
    EXPECT_EQ(weight.name, row.name);
    EXPECT_EQ(weight.format, row.format);
    EXPECT_EQ(weight.quant_method, row.quant_method);
    EXPECT_EQ(weight.shape, row.shape);
    EXPECT_EQ(weight.block, row.block);
    EXPECT_EQ(weight.parts.size(), row.tensors.size());
  }
}

TEST(Weights, TakesTheBlockOfFp8FromTheConfig) {
  TensorList list;
  list.add("w.weight", StoredDType::kF8E4M3, {192, 64});
  list.add("w.weight_scale_inv", StoredDType::kF32, {3, 1});
  const Opened opened(list, R"({"quantization_config": {"weight_block_size": [64, 64]}})");
  EXPECT_EQ(opened.weights[0].block, (std::vector<std::uint64_t>{64, 64}));
}

TEST(Weights, ColumnsAndTheMethodOfTheConfigGoTogether) {
  const std::int64_t shape[] = {9, 64};
  std::vector<std::int32_t> order(64);
  for (std::size_t i = 0; i < 64; ++i) order[i] = static_cast<std::int32_t>(63 - i);
  TensorList list;
  list.add("w.weight", StoredDType::kI32, {9, 8});
  list.add("w.weight_scale", StoredDType::kF16, {9, 2});
  list.add("w.weight_shape", StoredDType::kI64, {2}, bytes_of(shape, 2));
  const auto config = [](const std::string& method) {
    return R"({"quantization_config": {"quant_method": ")" + method + "\"}}";
  };
  const auto message = [&](const std::string& method) {
    return files::error_of([&] { const Opened opened(list, config(method)); });
  };
  EXPECT_NE(message("monograph").find("there is no columns"), std::string::npos);
  list.add("w.weight_columns", StoredDType::kI32, {64}, bytes_of(order.data(), 64));
  const Opened opened(list, config("monograph"));
  EXPECT_EQ(opened.weights[0].quant_method, "Monograph");
  EXPECT_EQ(opened.weights[0].columns.front(), 63u);
  const std::string found = message("compressed-tensors");
  EXPECT_NE(found.find("there is a columns, and quant_method is 'compressed-tensors'"),
            std::string::npos)
      << found;
  list.remove("w.weight_scale");
  EXPECT_NE(message("monograph").find("lacks weight_packed, weight_scale"), std::string::npos);
  list.add("w.weight_scale", StoredDType::kF16, {9, 2});
  list.at("w.weight").name = "w.weight_packed";
  EXPECT_NE(message("compressed-tensors").find("there is a columns"), std::string::npos);
  list.remove("w.weight_columns");
  EXPECT_NE(message("monograph").find("there is no columns"), std::string::npos);
}

TEST(Weights, AWeightAndOneOfTheSameNameWithASuffixStayApart) {
  TensorList list = nested_weight();
  list.add("w.bias", StoredDType::kBF16, {4});
  list.add("absmax", StoredDType::kF32, {1});
  const Opened opened(list);
  ASSERT_EQ(opened.weights.size(), 3u);
  EXPECT_EQ(opened.weights[0].name, "absmax");
  EXPECT_EQ(opened.weights[1].name, "w.bias");
}

class HostileWeights : public testing::TestWithParam<HostileCase> {};

TEST_P(HostileWeights, AreRefusedByTheirRule) {
  const TemporaryFolder folder;
  safetensors::make_case(GetParam(), folder.path());
  const Checkpoint checkpoint = Checkpoint::open(folder / GetParam().open);
  const std::string message = files::error_of([&] { list_weights(checkpoint); });
  EXPECT_NE(message.find(GetParam().rule), std::string::npos) << message;
  EXPECT_NE(message.find("model.safetensors"), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(All, HostileWeights, testing::ValuesIn(safetensors::hostile_weights()),
                         [](const auto& row) { return row.param.name; });

}  // namespace
}  // namespace monograph
