#include <gtest/gtest.h>

#include <cfloat>

#include "monograph/quant_methods/quant_state.h"

namespace monograph {
namespace {

TEST(QuantState, IsReadBackAsItWasWrittenAndItsLengthDoesNotDependOnTheOffset) {
  QuantState state;
  state.format = Format::kFp4;
  state.block = 128;
  state.dtype = DType::kFloat16;
  state.shape = {7, 3};
  state.elements = 21;
  state.nested = true;
  std::size_t length = 0;
  for (const float offset : {0.0f, 0.5f, 0.1f, -FLT_MIN, FLT_TRUE_MIN, FLT_MAX, 1.0f / 3}) {
    state.offset = offset;
    const std::string text = quant_state_text(state);
    const QuantState read = parse_quant_state(text, Format::kFp4, "x");
    EXPECT_EQ(read.offset, offset);
    EXPECT_EQ(read.shape, state.shape);
    EXPECT_EQ(read.block, state.block);
    EXPECT_EQ(read.dtype, state.dtype);
    EXPECT_TRUE(read.nested);
    if (length != 0) EXPECT_EQ(text.size(), length) << text;
    length = text.size();
  }
}

TEST(QuantState, IsTheTextOfBitsandbytes) {
  QuantState state;
  state.block = 64;
  state.shape = {4096, 1024};
  EXPECT_EQ(
      quant_state_text(state),
      R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4096, 1024]})");
}

}  // namespace
}  // namespace monograph
