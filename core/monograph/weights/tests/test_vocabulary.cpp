#include <gtest/gtest.h>

#include "monograph/weights/vocabulary.h"

namespace monograph {
namespace {

TEST(Vocabulary, NamesOfEmbeddingAndHead) {
  for (const char* name : {"model.embed_tokens.weight", "wte.weight", "gpt_neox.embed_in.weight"}) {
    EXPECT_TRUE(is_input_embedding(name)) << name;
    EXPECT_FALSE(is_head(name)) << name;
  }
  for (const char* name : {"lm_head.weight", "model.lm_head.weight", "embed_out.weight"}) {
    EXPECT_TRUE(is_head(name)) << name;
    EXPECT_FALSE(is_input_embedding(name)) << name;
  }
  for (const char* name :
       {"lm_head.bias", "my_lm_head.weight", "embed_tokens.weight.x", "weight"}) {
    EXPECT_FALSE(is_head(name) || is_input_embedding(name)) << name;
  }
}

TEST(Vocabulary, NewRowsAreCountedWhereAllAreTrained) {
  EXPECT_EQ(rows_of_new_tokens({}, 10).count, 0U);
  EXPECT_EQ(rows_of_new_tokens({9, 0, 3}, 10).count, 0U);
  const NewRows three = rows_of_new_tokens({12, 3, 10, 11}, 10);
  EXPECT_EQ(three.count, 3U);
  EXPECT_EQ(three.missing, "");
}

TEST(Vocabulary, ARowThatNothingTrainsIsNamed) {
  const NewRows gap = rows_of_new_tokens({10, 12}, 10);
  EXPECT_EQ(gap.count, 0U);
  EXPECT_EQ(gap.missing, "token 12 is not one of its 10 rows, and row 11 is not trained");
  EXPECT_NE(rows_of_new_tokens({~std::uint64_t{0}}, 10).missing, "");
}

}  // namespace
}  // namespace monograph
