// bind_packed: what it accepts for each format, and what it refuses by name.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/formats/bind.h"

namespace monograph {
namespace {

std::string refusal(const char* format, std::size_t block, std::vector<std::size_t> shape,
                    std::size_t values, std::vector<std::size_t> scales) {
  static const std::vector<std::uint8_t> bytes(1 << 16);
  std::vector<ByteSpan> spans;
  for (const std::size_t size : scales) spans.push_back({bytes.data(), size});
  try {
    bind_packed(*find_format(format), block, shape, {bytes.data(), values}, spans);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

PackedView bound(const char* format, std::size_t block, std::vector<std::size_t> shape,
                 std::vector<std::size_t> scales) {
  static const std::vector<std::uint8_t> bytes(1 << 16);
  std::vector<ByteSpan> spans;
  for (const std::size_t size : scales) spans.push_back({bytes.data(), size});
  std::size_t elements = 1;
  for (const std::size_t n : shape) elements *= n;
  const FormatInfo& info = *find_format(format);
  return bind_packed(info, block, shape, {bytes.data(), packed_bytes(info, elements)}, spans);
}

// No byte lies at these addresses: reading one would end the test.
TEST(Bind, BytesOfADeviceAreMeasuredAndNotRead) {
  const auto at = [](std::uintptr_t address) {
    return reinterpret_cast<const std::uint8_t*>(address);
  };
  for (const FormatInfo& info : formats()) {
    if (info.shape == BlockShape::kInterleaved) continue;  // below
    const std::size_t shape[] = {2, 256};
    const std::size_t block = info.shape == BlockShape::kGroup ? 256 : info.largest_block;
    const std::size_t blocks = block_count(info.shape, block, 1, 2, 256);
    std::vector<ByteSpan> scales = {
        {at(2), blocks * size_bytes(info.kinds.front()), Memory::kDevice}};
    const ByteSpan values = {at(1), packed_bytes(info, 512), Memory::kDevice};
    const PackedView plain = bind_packed(info, block, shape, values, scales);
    EXPECT_EQ(plain.values, at(1)) << info.name;
    EXPECT_EQ(plain.scales.blocks, at(2)) << info.name;
    EXPECT_EQ(plain.scales.offset_on_device, nullptr) << info.name;
    if (!info.double_quant) continue;
    scales = {{at(2), blocks, Memory::kDevice},
              {at(3), 4, Memory::kDevice},
              {at(4), 1024, Memory::kDevice},
              {at(5), 4, Memory::kDevice}};
    const PackedView nested = bind_packed(info, info.largest_block, shape, values, scales);
    EXPECT_EQ(nested.scales.offset_on_device, at(5)) << info.name;
    EXPECT_TRUE(std::isnan(nested.scales.offset)) << info.name;
    scales[1].size = scales[3].size = 8;  // two rows, quantised one by one
    scales[0].size = 2;
    const PackedGrids rows = bind_grids(info, info.largest_block, shape, 1, values, scales);
    EXPECT_EQ(rows.grid(1).scales.offset_on_device, at(9)) << info.name;
    EXPECT_TRUE(std::isnan(rows.grid(1).scales.offset)) << info.name;
  }
  const float offset = 0.25f;
  std::vector<std::uint8_t> bytes(2048);
  std::memcpy(bytes.data(), &offset, sizeof offset);
  const std::size_t shape[] = {64};
  const ByteSpan host = {bytes.data(), 32};
  const ByteSpan scales[] = {
      {bytes.data(), 1}, {bytes.data(), 4}, {bytes.data(), 1024}, {bytes.data(), 4}};
  const PackedView on_host = bind_packed(*find_format("nf4"), 64, shape, host, scales);
  EXPECT_EQ(on_host.scales.offset, offset);
  EXPECT_EQ(on_host.scales.offset_on_device, nullptr);
}

TEST(Bind, TheKindOfAScaleFollowsFromItsSize) {
  // 300 x 200: a grid of 3 x 2.
  EXPECT_EQ(bound("fp8-block", 128, {300, 200}, {24}).scales.kind, ScaleKind::kFp32);
  EXPECT_EQ(bound("fp8-block", 128, {300, 200}, {12}).scales.kind, ScaleKind::kBf16);
  EXPECT_EQ(bound("fp8-block", 128, {300, 200}, {6}).scales.kind, ScaleKind::kE8m0);
  EXPECT_EQ(refusal("fp8-block", 128, {300, 200}, 60000, {18}),
            "scales[0] (block scales) has 18 bytes, wanted 24 (float32) or 12 (bfloat16) or 6 "
            "(e8m0)");
}

TEST(Bind, BothConventionsOfNvfp4RunOnTheSameKernels) {
  const PackedView multiplies = bound("nvfp4", 16, {4, 32}, {8, 4});
  const PackedView divides = bound("nvfp4-divide", 16, {4, 32}, {8, 4});
  EXPECT_EQ(multiplies.format, Format::kNvfp4);
  EXPECT_EQ(divides.format, Format::kNvfp4);
  EXPECT_FALSE(multiplies.scales.tensor_divides);
  EXPECT_TRUE(divides.scales.tensor_divides);
  EXPECT_EQ(bound("nvfp4", 16, {4, 32}, {8}).scales.tensor, nullptr);
}

TEST(Bind, ExpertsHaveTheirOwnGridAndTheirOwnTensorScale) {
  const PackedView square = bound("fp8-block", 128, {3, 130, 64}, {24});
  EXPECT_EQ(square.matrix_rows, 130u);
  EXPECT_EQ(square.rows, 390u);
  EXPECT_EQ(bound("nvfp4", 16, {3, 4, 32}, {24, 12}).scales.blocks_per_tensor, 8u);
  EXPECT_EQ(bound("nvfp4", 16, {3, 4, 32}, {24, 4}).scales.blocks_per_tensor, 0u);
}

TEST(Bind, RefusesByName) {
  EXPECT_EQ(refusal("mxfp4", 32, {4, 48}, 96, {6}),
            "rows have 48 elements, format mxfp4 wants a multiple of 32");
  EXPECT_EQ(refusal("mxfp8", 64, {4, 64}, 256, {4}),
            "block size is 64, format mxfp8 wants a power of two from 32 to 32");
  EXPECT_EQ(refusal("mxfp4", 32, {4, 64}, 127, {8}), "values has 127 bytes, wanted 128");
  EXPECT_EQ(refusal("mxfp4", 32, {4, 64}, 128, {8, 4}),
            "scales has 2 tensors, format mxfp4 wants 1");
  EXPECT_EQ(refusal("nvfp4", 16, {4, 64}, 128, {16, 4, 4}),
            "scales has 3 tensors, format nvfp4 wants 1 (blocks) or 2 (blocks, tensor)");
  EXPECT_EQ(refusal("nvfp4", 16, {2, 4, 64}, 256, {32, 12}),
            "scales[1] (tensor) has 12 bytes, wanted 4");
  EXPECT_EQ(refusal("nf4", 64, {4, 64}, 128, {4}), "scales[0] (absmax) has 4 bytes, wanted 16");
}

std::string refusal_at(std::size_t origin, const char* format, std::size_t block,
                       std::vector<std::size_t> shape, std::size_t values,
                       std::vector<std::size_t> scales) {
  static const std::vector<std::uint8_t> bytes(1 << 16);
  std::vector<ByteSpan> spans;
  for (const std::size_t size : scales) spans.push_back({bytes.data(), size});
  try {
    bind_packed(*find_format(format), block, shape, {bytes.data(), values}, spans, origin);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Bind, APartBeginsWithABlockAndEndsWithItself) {
  // 3 x 33 elements behind 40: two blocks of 64 and a part of a third.
  EXPECT_EQ(refusal_at(40, "nf4", 64, {3, 33}, 70, {12}), "");
  EXPECT_EQ(refusal_at(40, "nf4", 64, {3, 33}, 50, {12}), "values has 50 bytes, wanted 70");
  EXPECT_EQ(refusal_at(40, "nf4", 64, {3, 33}, 70, {8}),
            "scales[0] (absmax) has 8 bytes, wanted 12");
  EXPECT_EQ(refusal_at(64 * 255, "nf4", 64, {1, 128}, 32 * 257, {257, 8, 1024, 4}), "");
  // 100 rows behind 60 of them: two rows of square blocks.
  EXPECT_EQ(refusal_at(60 * 40, "fp8-block", 128, {100, 40}, 160 * 40, {8}), "");
  EXPECT_EQ(refusal_at(60, "fp8-block", 128, {100, 40}, 4060, {8}),
            "the origin is 60, format fp8-block wants whole rows of 40");
  EXPECT_EQ(refusal_at(64, "mxfp4", 32, {2, 3, 64}, 224, {14}),
            "the origin is 64 and the weight has 2 matrices, format mxfp4 wants one");
  EXPECT_EQ(refusal_at(kMostElements, "nf4", 64, {3, 33}, 70, {12}),
            "the origin is 72057594037927936, wanted at most 2^56 elements with the weight");
}

std::string grids_refusal(std::size_t grid_rows, const char* format, std::size_t block,
                          std::vector<std::size_t> shape, std::size_t values,
                          std::vector<std::size_t> scales) {
  static const std::vector<std::uint8_t> bytes(1 << 16);
  std::vector<ByteSpan> spans;
  for (const std::size_t size : scales) spans.push_back({bytes.data(), size});
  try {
    bind_grids(*find_format(format), block, shape, grid_rows, {bytes.data(), values}, spans);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Bind, GridsHaveWholeBytesBlocksAndGroupsEach) {
  // Four matrices of 5 x 21: 53 bytes and two blocks each.
  EXPECT_EQ(grids_refusal(5, "nf4", 64, {2, 10, 21}, 212, {8, 16, 1024, 16}), "");
  EXPECT_EQ(grids_refusal(5, "nf4", 64, {2, 10, 21}, 212, {8, 16, 1024, 4}), "");
  EXPECT_EQ(grids_refusal(5, "nf4", 64, {2, 10, 21}, 210, {8, 16, 1024, 16}),
            "values has 210 bytes, wanted as many for each of the 4 grids");
  EXPECT_EQ(grids_refusal(5, "nf4", 64, {2, 10, 21}, 208, {8, 16, 1024, 16}),
            "one of 4 grids: values has 52 bytes, wanted 53");
  EXPECT_EQ(grids_refusal(5, "nf4", 64, {2, 10, 21}, 212, {8, 16, 1024, 8}),
            "one of 4 grids: scales[3] (offset) has 8 bytes, wanted 4");
  EXPECT_EQ(grids_refusal(3, "nf4", 64, {2, 10, 21}, 212, {32}),
            "a grid has 3 rows, wanted a part of the weight's 20");
  EXPECT_EQ(grids_refusal(4, "nvfp4", 16, {3, 4, 16}, 96, {12, 12}), "");
  EXPECT_EQ(grids_refusal(4, "nvfp4", 16, {3, 4, 16}, 96, {12, 8}),
            "one of 3 grids: scales[1] (tensor) has 8 bytes, wanted 4");
  EXPECT_EQ(grids_refusal(4, "mxfp4", 0, {3, 4, 32}, 192, {12}),
            "block size is 0, format mxfp4 wants a power of two from 32 to 32");
}

TEST(Bind, GroupsOfARow) {
  EXPECT_EQ(refusal("int4-fp16", 500, {133, 500}, 133 * 252, {133 * 2}), "");
  EXPECT_EQ(refusal("int4-fp16", 20, {133, 500}, 133 * 252, {133 * 25 * 2, 17 * 25 * 4}), "");
  EXPECT_EQ(refusal("int8-fp32", 500, {133, 500}, 133 * 500, {133 * 4, 133}), "");
  EXPECT_EQ(refusal("int8-packed-fp32", 501, {133, 501}, 133 * 504, {133 * 4, 34 * 4}), "");
  EXPECT_EQ(refusal("fp8-row-bf16", 500, {133, 500}, 133 * 500, {133 * 2}), "");
  EXPECT_EQ(refusal("fp8-row-fp32", 500, {133, 500}, 133 * 500, {4}), "");
  EXPECT_TRUE(bound("fp8-row-bf16", 64, {2, 64}, {2}).scales.one);
  EXPECT_FALSE(bound("fp8-row-bf16", 64, {1, 64}, {2}).scales.one);
  EXPECT_EQ(bound("int4-fp16", 64, {2, 64}, {4}).scales.kind, ScaleKind::kFp16);
  EXPECT_EQ(bound("int4-bf16", 64, {2, 64}, {4}).scales.kind, ScaleKind::kBf16);
}

TEST(Bind, GroupsOfARowAreRefusedByName) {
  EXPECT_EQ(refusal("int4-fp16", 0, {2, 64}, 64, {4}),
            "block size is 0, format int4-fp16 wants 1 or more, at most 2^56");
  EXPECT_EQ(refusal("int4-fp16", 48, {2, 64}, 64, {4}),
            "rows have 64 elements, format int4-fp16 wants a multiple of 48");
  EXPECT_EQ(refusal("int4-fp16", 500, {133, 500}, 133 * 250, {133 * 2}),
            "values has 33250 bytes, wanted 33516");
  EXPECT_EQ(refusal("int4-fp16", 64, {2, 64}, 64, {8}),
            "scales[0] (float16) has 8 bytes, wanted 4");
  EXPECT_EQ(refusal("int4-fp32", 64, {2, 64}, 64, {6}),
            "scales[0] (float32) has 6 bytes, wanted 8");
  EXPECT_EQ(refusal("int4-fp16", 64, {9, 64}, 9 * 32, {18, 4}),
            "scales[1] (zero points) has 4 bytes, wanted 8");
  EXPECT_EQ(refusal("int8-bf16", 64, {9, 64}, 9 * 64, {18, 8}),
            "scales[1] (zero points) has 8 bytes, wanted 9");
  EXPECT_EQ(refusal("int8-bf16", 64, {9, 64}, 9 * 64, {2, 9}),
            "scales[0] is one scale beside zero points, wanted 9");
  EXPECT_EQ(refusal("fp8-row-bf16", 64, {9, 64}, 9 * 64, {18, 9}),
            "scales has 2 tensors, format fp8-row-bf16 wants 1");
  EXPECT_EQ(
      refusal("int4-bf16", 64, {9, 64}, 9 * 32, {}),
      "scales has 0 tensors, format int4-bf16 wants 1 (symmetric) or 2 (scales, zero points)");
  EXPECT_EQ(refusal("int4-bf16", 64, {3, 2, 64}, 6 * 32, {12}),
            "the weight has 3 matrices, format int4-bf16 wants one");
  const std::size_t huge = std::size_t{1} << 56;
  EXPECT_EQ(refusal("int8-packed-bf16", huge, {1, huge}, 64, {2, 4}),
            "values has 64 bytes, wanted 72057594037927936");
  EXPECT_EQ(refusal("int4-bf16", 1, {huge, 1}, 64, {2, 4}),
            "values has 64 bytes, wanted 288230376151711744");
  EXPECT_NE(refusal("int4-bf16", 1, {huge, 2}, 64, {2, 4}).find("too many elements"),
            std::string::npos);
}

// Grids are matrices that were quantised one by one: the experts of a layer. Nine rows have two
// words of zero points, whose last fields are no row's.
TEST(Bind, GroupsOfARowInGrids) {
  const std::vector<std::uint8_t> bytes(4096);
  const auto spans = [&](std::vector<std::size_t> sizes) {
    std::vector<ByteSpan> found;
    for (const std::size_t size : sizes) found.push_back({bytes.data(), size});
    return found;
  };
  const std::size_t shape[] = {3, 9, 64};
  const PackedGrids grids = bind_grids(*find_format("int4-bf16"), 32, shape, 9,
                                       {bytes.data(), 27 * 32}, spans({27 * 4, 3 * 16}));
  EXPECT_EQ(grids.count, 3u);
  const PackedView last = grids.grid(2);
  EXPECT_EQ(last.rows, 9u);
  EXPECT_EQ(last.row_bytes, 32u);
  EXPECT_EQ(last.values, bytes.data() + 18 * 32);
  EXPECT_EQ(last.scales.blocks, bytes.data() + 18 * 4);
  EXPECT_EQ(last.scales.zeros, bytes.data() + 2 * 16);
  const PackedGrids one =
      bind_grids(*find_format("fp8-row-fp32"), 64, shape, 9, {bytes.data(), 27 * 64}, spans({12}));
  EXPECT_TRUE(one.grid(1).scales.one);
  EXPECT_EQ(one.grid(1).scales.blocks, bytes.data() + 4);
  EXPECT_EQ(one.grid(1).scales.zeros, nullptr);
  EXPECT_EQ(grids_refusal(9, "int4-bf16", 32, {3, 9, 64}, 27 * 32, {27 * 4, 3 * 8}),
            "one of 3 grids: scales[1] (zero points) has 8 bytes, wanted 16");
  EXPECT_EQ(grids_refusal(9, "int4-bf16", 32, {3, 9, 64}, 27 * 32, {27 * 4, 4}),
            "scales[1] has 4 bytes, wanted as many for each of the 3 grids");
}

std::string map_refusal(const std::vector<std::int32_t>& map, std::size_t values) {
  static const std::vector<std::uint8_t> bytes(1 << 12);
  const std::size_t shape[] = {map.size(), 64};
  const ByteSpan scales[] = {{reinterpret_cast<const std::uint8_t*>(map.data()), 4 * map.size()}};
  try {
    bind_packed(*find_format("q4_0"), 32, shape, {bytes.data(), values}, scales);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Bind, ScalesBesideTheValues) {
  EXPECT_EQ(refusal("q8_0", 32, {133, 64}, 133 * 68, {}), "");
  EXPECT_EQ(refusal("q6_k", 256, {7, 512}, 7 * 420, {}), "");
  EXPECT_EQ(refusal("q6_k", 256, {7, 512}, 7 * 420, {7 * 4}), "");
  EXPECT_EQ(refusal("q6_k", 256, {0, 512}, 0, {}), "");
  EXPECT_EQ(refusal_at(3 * 64, "q4_0", 32, {5, 64}, 8 * 36, {}), "");
  EXPECT_EQ(map_refusal({1, 0, 2}, 3 * 36), "");
  EXPECT_EQ(map_refusal({7, 2}, 8 * 36), "");
}

TEST(Bind, ScalesBesideTheValuesAreRefusedByName) {
  EXPECT_EQ(refusal("q4_0", 64, {2, 64}, 72, {}), "block size is 64, format q4_0 wants 32");
  EXPECT_EQ(refusal("q4_k", 256, {2, 320}, 72, {}),
            "rows have 320 elements, format q4_k wants a multiple of 256");
  EXPECT_EQ(refusal("q4_0", 32, {2, 64}, 71, {}), "values has 71 bytes, wanted 72");
  EXPECT_EQ(refusal("q4_0", 32, {2, 64}, 71, {8}), "values has 71 bytes, wanted rows of 36");
  EXPECT_EQ(refusal("q4_0", 32, {2, 64}, 72, {4}), "scales[0] (row map) has 4 bytes, wanted 8");
  EXPECT_EQ(refusal("q4_0", 32, {2, 64}, 72, {8, 8}),
            "scales has 2 tensors, format q4_0 wants none, or 1 (row map)");
  EXPECT_EQ(refusal("q4_0", 32, {3, 2, 64}, 216, {}),
            "the weight has 3 matrices, format q4_0 wants one");
  EXPECT_EQ(grids_refusal(2, "q4_0", 32, {4, 64}, 144, {}), "");
  EXPECT_EQ(
      grids_refusal(2, "q4_0", 32, {4, 64}, 144, {16}),
      "the weight has a row map and grids of 2 rows, format q4_0 wants one matrix, or rows in "
      "order");
  EXPECT_EQ(map_refusal({0, 1, 3}, 3 * 36), "scales[0] (row map) has the row 3, values has 3 rows");
  EXPECT_EQ(map_refusal({0, -1, 2}, 3 * 36),
            "scales[0] (row map) has the row -1, values has 3 rows");
}

}  // namespace
}  // namespace monograph
