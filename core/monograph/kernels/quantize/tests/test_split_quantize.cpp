// split_quantize against quantize of each matrix and of its transpose alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/kernels/quantize/split_quantize.h"

namespace monograph {
namespace {

struct Whole {
  std::vector<std::uint8_t> values, scales, tensor;
};

Whole alone(const FormatInfo& info, const std::vector<float>& in, std::size_t rows,
            std::size_t cols) {
  QuantizeJob job = {};
  job.format = info.kernels;
  job.dtype = DType::kFloat32;
  job.input = in.data();
  job.elements = rows * cols;
  job.block = info.smallest_block;
  job.nonfinite = NonFinite::kError;
  job.rule = info.rules.front();
  job.kind = info.kinds.front();
  job.shape = info.shape;
  job.matrix_rows = rows;
  job.cols = cols;
  Whole out;
  out.values.resize(packed_bytes(info, job.elements));
  out.scales.resize(job.blocks() * size_bytes(job.kind));
  job.values = out.values.data();
  job.scales = out.scales.data();
  TensorScales scales;
  if (info.tensor_scale != TensorScale::kNone) {
    scales =
        choose_tensor_scales(job.format, job.rule, job.dtype, in.data(), in.size(), serial_for);
    const float stored = info.tensor_scale == TensorScale::kDivides ? scales.encode : scales.decode;
    out.tensor.resize(sizeof stored);
    std::memcpy(out.tensor.data(), &stored, sizeof stored);
    job.tensors = &scales;
    job.blocks_per_tensor = std::max<std::size_t>(job.blocks(), 1);
  }
  EXPECT_FALSE(quantize(job, serial_for));
  return out;
}

std::vector<float> transposed(const std::vector<float>& in, std::size_t rows, std::size_t cols) {
  std::vector<float> out(in.size());
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < cols; ++c) out[c * rows + r] = in[r * cols + c];
  return out;
}

void expect_part(const std::vector<std::uint8_t>& buffer, std::size_t begin,
                 const std::vector<std::uint8_t>& want, std::vector<bool>& used) {
  EXPECT_EQ(begin % kPartAlignment, 0u);
  ASSERT_LE(begin + want.size(), buffer.size());
  EXPECT_TRUE(std::equal(want.begin(), want.end(), buffer.begin() + static_cast<long>(begin)));
  for (std::size_t i = 0; i < want.size(); ++i) {
    EXPECT_FALSE(used[begin + i]);
    used[begin + i] = true;
  }
}

const std::size_t kSplits[] = {32, 0, 64, 160};
constexpr std::size_t kCols = 96;

SplitQuantizeJob job_of(const FormatInfo& info, const std::vector<float>& in,
                        std::vector<std::uint8_t>* rowwise, std::vector<std::uint8_t>* columnwise) {
  return {info,
          DType::kFloat32,
          in.data(),
          kSplits,
          kCols,
          info.smallest_block,
          info.rules.front(),
          NonFinite::kError,
          rowwise != nullptr ? rowwise->data() : nullptr,
          columnwise != nullptr ? columnwise->data() : nullptr};
}

std::vector<float> random_input() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> in(256 * kCols);
  for (float& x : in) x = normal(random);
  return in;
}

TEST(SplitQuantize, EveryPartIsThatOfItsMatrixAlone) {
  const std::vector<float> in = random_input();
  for (const FormatInfo& info : formats()) {
    if (info.shape == BlockShape::kGroup || info.rules.empty())
      continue;  // refused by the operator
    std::vector<std::uint8_t> buffers[2];
    for (const bool columnwise : {false, true})
      buffers[columnwise ? 1 : 0].assign(
          place_splits(info, info.smallest_block, kSplits, kCols, columnwise).size_bytes, 0xa5);
    ASSERT_FALSE(split_quantize(job_of(info, in, &buffers[0], &buffers[1]), serial_for));
    for (const bool columnwise : {false, true}) {
      const auto& buffer = buffers[columnwise ? 1 : 0];
      const SplitPlaces found = place_splits(info, info.smallest_block, kSplits, kCols, columnwise);
      std::vector<bool> used(buffer.size());
      auto begin = in.begin();
      for (std::size_t i = 0; i < std::size(kSplits); ++i) {
        const std::size_t rows = kSplits[i];
        const auto end = begin + static_cast<long>(rows * kCols);
        std::vector<float> own(begin, end);
        begin = end;
        const Whole want = columnwise ? alone(info, transposed(own, rows, kCols), kCols, rows)
                                      : alone(info, own, rows, kCols);
        expect_part(buffer, found.places[i].values, want.values, used);
        expect_part(buffer, found.places[i].scales, want.scales, used);
        expect_part(buffer, found.places[i].tensor, want.tensor, used);
      }
      for (std::size_t i = 0; i < used.size(); ++i)
        if (!used[i]) {
          ASSERT_EQ(buffer[i], 0) << info.name << " padding at " << i;
        }
    }
  }
}

TEST(SplitQuantize, NamesTheFirstElementThatIsNotFinite) {
  const FormatInfo& info = *find_format(Format::kMxfp8);
  std::vector<float> in = random_input();
  const std::size_t bad = 40 * kCols + 5;
  in[bad] = std::nanf("");
  for (const bool columnwise : {false, true}) {
    std::vector<std::uint8_t> out(
        place_splits(info, info.smallest_block, kSplits, kCols, columnwise).size_bytes);
    const auto found = split_quantize(
        job_of(info, in, columnwise ? nullptr : &out, columnwise ? &out : nullptr), serial_for);
    EXPECT_EQ(found, bad);
  }
}

TEST(SplitQuantize, ASplitWhoseColumnsAreNotWholeBlocksIsNamed) {
  const std::size_t splits[] = {32, 40};
  try {
    place_splits(*find_format(Format::kMxfp8), 32, splits, 64, /*columnwise=*/true);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("split 1 columnwise"), std::string::npos);
  }
}

}  // namespace
}  // namespace monograph
