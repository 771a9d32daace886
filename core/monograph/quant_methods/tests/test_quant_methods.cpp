// The table of producers.
#include <gtest/gtest.h>

#include <set>

#include "monograph/quant_methods/packed_parts.h"
#include "monograph/quant_methods/quant_method.h"

namespace monograph {
namespace {

TEST(QuantMethods, EachProducerIsListedOnceAndIsRead) {
  std::set<std::string_view> names;
  for (const QuantMethod* method : quant_methods()) {
    EXPECT_TRUE(names.insert(method->name).second) << method->name;
    EXPECT_FALSE(method->stored.empty()) << method->name;
  }
  EXPECT_EQ(names.count("plain"), 0u);
}

TEST(QuantMethods, WhoIsWrittenHasAConfigAndReadsTheFormat) {
  for (const QuantMethod* method : quant_methods()) {
    EXPECT_EQ(method->written.empty(), method->config == nullptr) << method->name;
    for (const WrittenForm& form : method->written) {
      EXPECT_EQ(written_by(form.format, form.stack).form, &form) << form.name;
      EXPECT_EQ(form.specs != nullptr, form.write != nullptr) << form.name;
      EXPECT_TRUE(!form.values.empty() || form.specs != nullptr) << form.name;
    }
  }
}

// The order of help pages and messages.
TEST(QuantMethods, UsersNameTheFormatsInTheirOrder) {
  EXPECT_EQ(written_names(), (std::vector<std::string>{"nf4", "fp4", "mxfp4", "mxfp8", "nvfp4",
                                                       "fp8-block", "int4", "int8", "fp8"}));
  EXPECT_EQ(written_name(Format::kInt4Fp16), "int4");
  EXPECT_EQ(written_format("nvfp4"), Format::kNvfp4Divide);
  EXPECT_EQ(producer_of(Format::kMxfp4), "compressed-tensors");
  EXPECT_EQ(written_by(Format::kMxfp4, Stack::kGptOss).method->name, "gpt-oss");
}

}  // namespace
}  // namespace monograph
