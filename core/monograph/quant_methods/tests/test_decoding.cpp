// Every producer's form of a format with small floats decodes to the values of the slow reference.
#include <gtest/gtest.h>

#include "monograph/files/tests/temporary_folder.h"
#include "monograph/formats/tests/group_weight.h"
#include "monograph/quant_methods/list_weights.h"
#include "monograph/quant_methods/tests/tensor_list.h"
#include "monograph/safetensors/tests/hostile_files.h"
#include "monograph/weights/weight.h"

namespace monograph {
namespace {

using T = safetensors::StoredDType;
using Shape = std::vector<std::uint64_t>;

std::string text(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

struct Stored {
  std::string label;
  Format format;
  ScaleKind kind;
  std::size_t matrices, rows, cols;
  std::string values, scales, tensor;  // names
  T values_type, scales_type;
  Shape values_shape, scales_shape;
};

std::vector<Stored> stored_weights() {
  using enum ScaleKind;
  return {
      {"deepseek_fp32",
       Format::kFp8Block,
       kFp32,
       1,
       300,
       257,
       "w.weight",
       "w.weight_scale_inv",
       "",
       T::kF8E4M3,
       T::kF32,
       {300, 257},
       {3, 3}},
      {"qwen_bf16",
       Format::kFp8Block,
       kBf16,
       1,
       192,
       576,
       "w.weight",
       "w.weight_scale_inv",
       "",
       T::kF8E4M3,
       T::kBF16,
       {192, 576},
       {2, 5}},
      {"ue8m0",
       Format::kFp8Block,
       kE8m0,
       1,
       130,
       128,
       "w.weight",
       "w.weight_scale_inv",
       "",
       T::kF8E4M3,
       T::kF8E8M0,
       {130, 128},
       {2, 1}},
      {"experts",
       Format::kFp8Block,
       kFp32,
       3,
       200,
       128,
       "w.weight",
       "w.weight_scale_inv",
       "",
       T::kF8E4M3,
       T::kF32,
       {3, 200, 128},
       {3, 2, 1}},
      {"blocks",
       Format::kFp8Block,
       kBf16,
       1,
       256,
       256,
       "w.weight",
       "w.weight_scale",
       "",
       T::kF8E4M3,
       T::kBF16,
       {256, 256},
       {2, 2}},
      {"mxfp8",
       Format::kMxfp8,
       kE8m0,
       1,
       5,
       96,
       "w.weight",
       "w.weight_scale",
       "",
       T::kF8E4M3,
       T::kU8,
       {5, 96},
       {5, 3}},
      {"mxfp4",
       Format::kMxfp4,
       kE8m0,
       1,
       5,
       96,
       "w.weight_packed",
       "w.weight_scale",
       "",
       T::kU8,
       T::kU8,
       {5, 48},
       {5, 3}},
      {"gpt_oss",
       Format::kMxfp4,
       kE8m0,
       2,
       5,
       96,
       "w_blocks",
       "w_scales",
       "",
       T::kU8,
       T::kU8,
       {2, 5, 3, 16},
       {2, 5, 3}},
      {"deepseek_fp4",
       Format::kMxfp4,
       kE8m0,
       1,
       5,
       64,
       "w.weight",
       "w.weight_scale_inv",
       "",
       T::kI8,
       T::kF8E8M0,
       {5, 32},
       {5, 2}},
      {"modelopt",
       Format::kNvfp4,
       kE4m3,
       1,
       5,
       80,
       "w.weight",
       "w.weight_scale",
       "w.weight_scale_2",
       T::kU8,
       T::kF8E4M3,
       {5, 40},
       {5, 5}},
      {"compressed",
       Format::kNvfp4Divide,
       kE4m3,
       1,
       5,
       80,
       "w.weight_packed",
       "w.weight_scale",
       "w.weight_global_scale",
       T::kU8,
       T::kF8E4M3,
       {5, 40},
       {5, 5}},
  };
}

class Decoding : public testing::TestWithParam<Stored> {};

TEST_P(Decoding, GivesTheValuesOfTheReference) {
  const Stored& row = GetParam();
  const ReferenceWeight want = random_reference(*find_format(row.format), row.kind, row.matrices,
                                                row.rows, row.cols, /*seed=*/7);
  TensorList list;
  list.add(row.values, row.values_type, row.values_shape, text(want.values));
  list.add(row.scales, row.scales_type, row.scales_shape, text(want.scales));
  if (!row.tensor.empty()) list.add(row.tensor, T::kF32, {}, text(want.tensor));
  const files::TemporaryFolder folder;
  files::write_all(folder / "model.safetensors", list.file());
  const auto checkpoint = safetensors::Checkpoint::open(folder.path());
  const std::vector<Weight> weights = list_weights(checkpoint);
  ASSERT_EQ(weights.size(), 1u);
  const Weight& weight = weights[0];
  ASSERT_TRUE(weight.is_readable());
  ASSERT_EQ(weight.elements, want.elements.size());
  std::vector<float> got(want.elements.size());
  read_elements(weight, 0, weight.elements, DType::kFloat32, got.data());
  EXPECT_EQ(got, want.elements);
  // Any range is the part of the whole.
  const std::size_t begin = got.size() / 3 + 1, count = got.size() / 2;
  std::vector<float> part(count);
  read_elements(weight, begin, begin + count, DType::kFloat32, part.data());
  EXPECT_TRUE(std::equal(part.begin(), part.end(), got.begin() + static_cast<long>(begin)));
}

INSTANTIATE_TEST_SUITE_P(All, Decoding, testing::ValuesIn(stored_weights()),
                         [](const auto& row) { return row.param.label; });

// compressed-tensors' integers and FP8 by row: as it names and shapes them.
TEST(Decoding, GroupsOfARow) {
  for (const auto& [info, symmetric] : group_cases()) {
    const bool floats = info->zero_points == ZeroPoints::kNone;
    const bool packed = info->zero_points == ZeroPoints::kPacked;
    const std::uint64_t block = floats ? 500 : 20, groups = 500 / block;
    const GroupWeight want = random_groups(*info, 21, 500, block, symmetric, 9);
    SCOPED_TRACE(want.name());
    const T scale = info->kinds[0] == ScaleKind::kFp32   ? T::kF32
                    : info->kinds[0] == ScaleKind::kFp16 ? T::kF16
                                                         : T::kBF16;
    const auto bits = static_cast<std::uint64_t>(info->bits);
    TensorList list;
    if (packed)
      list.add("w.weight_packed", T::kI32, {21, want.value_bytes.size() / 84},
               text(want.value_bytes));
    else
      list.add("w.weight", floats ? T::kF8E4M3 : T::kI8, {21, 500}, text(want.value_bytes));
    list.add("w.weight_scale", scale, {21, groups}, text(want.scale_bytes));
    const std::int64_t shape[] = {21, 500};
    if (packed) list.add("w.weight_shape", T::kI64, {2}, bytes_of(shape, 2));
    if (!symmetric && packed)
      list.add("w.weight_zero_point", T::kI32, {(21 * bits + 31) / 32, groups},
               text(want.zero_bytes));
    if (!symmetric && !packed)
      list.add("w.weight_zero_point", T::kI8, {21, groups}, text(want.zero_bytes));
    const files::TemporaryFolder folder;
    files::write_all(folder / "model.safetensors", list.file());
    const auto checkpoint = safetensors::Checkpoint::open(folder.path());
    const std::vector<Weight> weights = list_weights(checkpoint);
    ASSERT_EQ(weights.size(), 1u);
    ASSERT_TRUE(weights[0].is_readable());
    EXPECT_EQ(weights[0].dtype, scale);
    std::vector<float> got(want.elements.size());
    read_elements(weights[0], 0, weights[0].elements, DType::kFloat32, got.data());
    EXPECT_EQ(got, want.elements);
  }
}

TEST(Decoding, Fp16ScalesAreNotTakenForBf16) {
  TensorList list;
  list.add("w.weight", T::kF8E4M3, {128, 128});
  list.add("w.weight_scale_inv", T::kF16, {1, 1});
  const files::TemporaryFolder folder;
  files::write_all(folder / "model.safetensors", list.file());
  const auto checkpoint = safetensors::Checkpoint::open(folder.path());
  EXPECT_FALSE(list_weights(checkpoint)[0].is_readable());
}

}  // namespace
}  // namespace monograph
