// GPTQ's and AWQ's words, packed here bit by bit from codes, against the formula on these codes.
#include <gtest/gtest.h>

#include "monograph/convert/convert.h"
#include "monograph/convert/turn_words.h"
#include "monograph/files/tests/temporary_folder.h"
#include "monograph/quant_methods/list_weights.h"
#include "monograph/quant_methods/tests/tensor_list.h"
#include "monograph/quant_methods/turned_config.h"

namespace monograph {
namespace {

using files::error_of;
using files::TemporaryFolder;
using safetensors::Checkpoint;
using safetensors::StoredDType;

struct Source {
  unsigned bits = 4;
  std::size_t outputs = 24, inputs = 64, group = 32;
  bool awq = false;
  bool shuffled = false;                 // groups are scattered over the inputs
  std::vector<std::int32_t> given = {};  // g_idx instead of that
  int less = 0;                          // subtracted from every zero point's field
  bool borrows = false;                  // from the word instead
  int only_zero = -1;                    // the zero point of all groups, or -1: all there are
  std::string settings = {};

  std::size_t groups() const { return inputs / group; }
  unsigned code(std::size_t n, std::size_t k) const {
    return static_cast<unsigned>(n * 7 + k * 5 + n * k) % (1u << bits);
  }
  unsigned zero(std::size_t n, std::size_t g) const {
    return only_zero >= 0 ? static_cast<unsigned>(only_zero)
                          : static_cast<unsigned>(n * 3 + g) % (1u << bits);
  }
  Fp16 scale(std::size_t n, std::size_t g) const {
    return from_float<Fp16>(0.01f * static_cast<float>(n + 1) + 0.3f * static_cast<float>(g));
  }
  // Stable for no two groups: neighbours are of different ones.
  std::size_t group_of(std::size_t k) const {
    return shuffled ? (k * 5 + k / groups()) % groups() : k / group;
  }
  float element(std::size_t n, std::size_t k) const {
    const auto g = group_of(k);
    return (static_cast<float>(code(n, k)) - static_cast<float>(zero(n, g))) *
           to_float(scale(n, g));
  }
};

// Field `at` of a row of words.
void put(std::vector<std::uint32_t>& words, std::size_t row, std::size_t row_words, std::size_t at,
         unsigned bits, std::uint32_t field) {
  const std::size_t per_word = 32 / bits;
  words[row * row_words + at / per_word] |= field << (at % per_word * bits);
}

// Where AWQ puts output n.
std::size_t awq_place(std::size_t n) {
  const std::size_t place[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  return n / 8 * 8 + place[n % 8];
}

TensorList file_of(const Source& s) {
  const std::size_t per_word = 32 / s.bits, out_words = s.outputs / per_word;
  std::vector<std::uint32_t> values(s.inputs * s.outputs / per_word);
  std::vector<std::uint32_t> zeros(s.groups() * out_words);
  std::vector<Fp16> scales(s.groups() * s.outputs);
  std::vector<std::int32_t> g_idx(s.inputs);
  for (std::size_t n = 0; n < s.outputs; ++n) {
    for (std::size_t k = 0; k < s.inputs; ++k) {
      if (s.awq) {
        put(values, k, out_words, awq_place(n), 4, s.code(n, k));
      } else {
        values[k / per_word * s.outputs + n] |= s.code(n, k) << (k % per_word * s.bits);
      }
    }
    for (std::size_t g = 0; g < s.groups(); ++g) {
      scales[g * s.outputs + n] = s.scale(n, g);
      const unsigned full = (1u << s.bits) - 1;
      const unsigned field = (s.zero(n, g) - static_cast<unsigned>(s.borrows ? 0 : s.less)) & full;
      put(zeros, g, out_words, s.awq ? awq_place(n) : n, s.bits, field);
    }
  }
  if (s.borrows) {
    for (std::uint32_t& word : zeros) word -= s.bits == 4 ? 0x11111111u : 0x01010101u;
  }
  for (std::size_t k = 0; k < s.inputs; ++k) {
    g_idx[k] = static_cast<std::int32_t>(s.group_of(k));
  }
  if (!s.given.empty()) g_idx = s.given;
  TensorList list;
  const std::uint64_t rows = s.awq ? s.inputs : s.inputs / per_word;
  list.add("x.qweight", StoredDType::kI32, {rows, s.awq ? out_words : s.outputs},
           bytes_of(values.data(), values.size()));
  list.add("x.qzeros", StoredDType::kI32, {s.groups(), out_words},
           bytes_of(zeros.data(), zeros.size()));
  list.add("x.scales", StoredDType::kF16, {s.groups(), s.outputs},
           bytes_of(scales.data(), scales.size()));
  if (!s.awq) {
    list.add("x.g_idx", StoredDType::kI32, {g_idx.size()}, bytes_of(g_idx.data(), g_idx.size()));
  }
  list.add("x.bias", StoredDType::kF16, {2}, std::string(4, 'b'));
  return list;
}

json::Value config_of(const Source& s) {
  const std::string group = s.group == s.inputs ? "-1" : std::to_string(s.group);
  return json::parse("{\"quantization_config\": {\"quant_method\": \"" +
                         std::string(s.awq ? "awq" : "gptq") +
                         "\", \"bits\": " + std::to_string(s.bits) + ", \"group_size\": " + group +
                         (s.settings.empty() ? "" : ", " + s.settings) + "}}",
                     "config.json");
}

struct Opened {
  TemporaryFolder folder;
  Checkpoint checkpoint;
  std::vector<Weight> weights;
};

std::unique_ptr<Opened> open(const TensorList& list, const json::Value& config) {
  auto opened = std::make_unique<Opened>();
  files::write_all(opened->folder / "model.safetensors", list.file());
  opened->checkpoint = Checkpoint::open(opened->folder.path());
  opened->weights = list_weights(opened->checkpoint, &config);
  return opened;
}

Conversion turned(const Weight& weight, const json::Value& config) {
  const WordLayout words = words_of(weight, config);
  return {.weight = &weight,
          .action = Action::kTurn,
          .words = words,
          .symmetric = zeros_are_middle(weight, words),
          .writes_columns = !words.columns.empty()};
}

const Weight& find(const std::vector<Weight>& weights, std::string_view name) {
  for (const Weight& weight : weights) {
    if (weight.name == name) return weight;
  }
  throw Error("no weight " + std::string(name));
}

void check(const Source& s) {
  const json::Value config = config_of(s);
  const auto from = open(file_of(s), config);
  const Weight& weight = find(from->weights, "x.weight");
  EXPECT_EQ(weight.format, s.awq ? "awq" : "gptq");
  EXPECT_EQ(weight.shape, (std::vector<std::uint64_t>{s.outputs, s.inputs}));
  std::vector<Conversion> conversions;
  for (const Weight& one : from->weights) {
    conversions.push_back(one.is_packed() ? turned(one, config) : Conversion{.weight = &one});
  }
  std::vector<safetensors::TensorSpec> specs;
  for (const Conversion& one : conversions) {
    for (auto& spec : specs_of(one)) specs.push_back(spec);
  }
  const TemporaryFolder folder;
  safetensors::ShardedWriter writer(
      folder.path(), safetensors::plan_shards(specs, {{"format", "pt"}}, UINT64_MAX));
  convert(conversions, writer, {.threads = 2});
  writer.finish();
  json::Value new_config = json::Value::object();
  new_config.set("quantization_config", turned_config(conversions));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  const std::vector<Weight> weights = list_weights(checkpoint, &new_config);
  const Weight& got = find(weights, "x.weight");
  EXPECT_EQ(got.quant_method, s.shuffled ? "Monograph" : "compressed-tensors");
  EXPECT_EQ(checkpoint.find("x.weight_columns") != nullptr, s.shuffled);
  EXPECT_EQ(got.columns.size(), s.shuffled ? s.inputs : 0);
  EXPECT_EQ(got.format, s.bits == 4 ? "int4" : "int8");
  EXPECT_EQ(find(weights, "x.bias").size_bytes, 4u);
  EXPECT_EQ(checkpoint.find("x.weight_zero_point") == nullptr,
            s.only_zero == (s.bits == 4 ? 8 : 128));
  std::vector<float> elements(s.outputs * s.inputs);
  read_elements(got, 0, elements.size(), DType::kFloat32, elements.data());
  for (std::size_t n = 0; n < s.outputs; ++n) {
    for (std::size_t k = 0; k < s.inputs; ++k) {
      ASSERT_EQ(elements[n * s.inputs + k], s.element(n, k)) << n << ", " << k;
    }
  }
}

TEST(TurnWords, SecondVersionHasEveryCodeAndZeroPoint) {
  for (const unsigned bits : {4u, 8u}) {
    for (const std::size_t group : {8u, 32u, 64u}) {
      check({.bits = bits,
             .outputs = bits == 4 ? 24u : 264u,
             .group = group,
             .settings = "\"checkpoint_format\": \"gptq_v2\""});
    }
  }
}

TEST(TurnWords, FirstVersionStoresZeroPointsLessOne) {
  check({.less = 1, .only_zero = 8});
  check({.less = 1, .only_zero = 1, .settings = "\"checkpoint_format\": \"gptq\""});
  check({.bits = 8, .outputs = 264, .less = 1, .only_zero = 128});
  check({.bits = 8, .outputs = 264, .less = 1, .only_zero = 255});
}

TEST(TurnWords, GptqModelSubtractsFromWholeWords) {
  const std::string meta = "\"meta\": {\"quantizer\": [\"gptqmodel:7.7.0\"]}";
  check({.borrows = true, .settings = meta});
  check({.bits = 8, .outputs = 264, .borrows = true, .settings = meta});
}

TEST(TurnWords, Awq) {
  check({.awq = true, .settings = "\"version\": \"GEMM\", \"zero_point\": true"});
  check({.inputs = 96, .group = 96, .awq = true});
  check({.awq = true, .only_zero = 8});
}

TEST(TurnWords, MoreThanOnePiece) {
  check({.outputs = 1040,
         .inputs = 8192,
         .group = 128,
         .settings = "\"checkpoint_format\": \"gptq_v2\""});
  check({.outputs = 1040, .inputs = 8192, .group = 128, .awq = true});
}

TEST(TurnWords, ScatteredGroupsAreSortedAndReadInTheirOrder) {
  const std::string second = "\"checkpoint_format\": \"gptq_v2\", \"desc_act\": true";
  for (const unsigned bits : {4u, 8u}) {
    for (const std::size_t group : {8u, 16u, 32u}) {
      check({.bits = bits,
             .outputs = bits == 4 ? 24u : 264u,
             .group = group,
             .shuffled = true,
             .settings = second});
    }
  }
  check({.outputs = 1040, .inputs = 8192, .group = 128, .shuffled = true, .settings = second});
  check({.shuffled = true, .less = 1, .only_zero = 8});
  check({.bits = 8, .outputs = 264, .shuffled = true, .less = 1, .only_zero = 128});
}

TEST(TurnWords, PartsOfRowsHaveTheOrderOfTheWeight) {
  const Source s = {.shuffled = true, .settings = "\"checkpoint_format\": \"gptq_v2\""};
  const json::Value config = config_of(s);
  const auto from = open(file_of(s), config);
  const std::vector<Conversion> conversions = {turned(find(from->weights, "x.weight"), config)};
  const TemporaryFolder folder;
  safetensors::ShardedWriter writer(
      folder.path(), safetensors::plan_shards(specs_of(conversions[0]), {}, UINT64_MAX));
  convert(conversions, writer, {});
  writer.finish();
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  const std::vector<Weight> weights = list_weights(checkpoint);
  for (std::size_t begin = 0; begin < 3 * s.inputs; begin += 7) {
    std::vector<float> part(2 * s.inputs - 3);
    read_elements(weights[0], begin, begin + part.size(), DType::kFloat32, part.data());
    for (std::size_t i = 0; i < part.size(); ++i) {
      ASSERT_EQ(part[i], s.element((begin + i) / s.inputs, (begin + i) % s.inputs)) << begin;
    }
  }
}

std::string refusal(const Source& s, json::Value config) {
  return error_of([&] {
    const auto from = open(file_of(s), config);
    turned(find(from->weights, "x.weight"), config);
  });
}

TEST(TurnWords, WhatHasTwoReadingsOrNoneIsRefused) {
  const auto says = [](const Source& s, std::string_view what) {
    const std::string found = refusal(s, config_of(s));
    EXPECT_NE(found.find(what), std::string::npos) << found;
  };
  says({.less = 1, .only_zero = 0}, "a zero point is stored as 15, which is 0 or 16");
  says({.bits = 8, .outputs = 264, .less = 1, .only_zero = 0}, "stored as 255, which is 0 or 256");
  says({.shuffled = true, .settings = "\"desc_act\": false"},
       "g_idx takes inputs out of order, and desc_act is false");
  const auto with = [&](std::size_t at, std::int32_t group) {
    std::vector<std::int32_t> g_idx(64);
    for (std::size_t i = 0; i < 64; ++i) g_idx[i] = static_cast<std::int32_t>(i / 32);
    g_idx[at] = group;
    return Source{.given = g_idx};
  };
  says(with(3, -1), "g_idx puts input 3 into group -1, wanted 0 to 1");
  says(with(40, 2), "g_idx puts input 40 into group 2, wanted 0 to 1");
  says(with(3, 1), "g_idx puts 31 inputs into group 0, wanted 32 in each");
  says({.given = std::vector<std::int32_t>(60)}, "g_idx has the shape [60], wanted [64]");
  says({.awq = true, .settings = "\"version\": \"gemv\""}, "version is 'gemv', wanted gemm");
  says({.settings = "\"checkpoint_format\": \"marlin\""}, "checkpoint_format is 'marlin'");
}

TEST(TurnWords, SettingsAndShapesThatContradictAreNamed) {
  const Source s;
  const auto with = [&](const std::string& settings) {
    return refusal(s, json::parse("{\"quantization_config\": {" + settings + "}}", "config.json"));
  };
  const auto has = [](const std::string& found, std::string_view what) {
    EXPECT_NE(found.find(what), std::string::npos) << found;
  };
  has(with(R"("quant_method": "gptq", "bits": 3, "group_size": 32)"), "bits is 3, wanted 4 or 8");
  has(with(R"("quant_method": "gptq", "group_size": 32)"), "bits is missing");
  has(with(R"("quant_method": "gptq", "bits": 4, "group_size": 16)"), "group_size is 16");
  has(with(R"("quant_method": "gptq", "bits": 8, "group_size": 32)"),
      "zero_point has the shape [2, 3], wanted [2, 6]");
  has(with(R"("quant_method": "hqq", "bits": 4, "group_size": 32)"), "quant_method is 'hqq'");
  has(with(R"("quant_method": "auto-round", "bits": 4, "group_size": 32)"), "packing_format is ''");
  has(with(R"("quant_method": "awq", "bits": 4, "group_size": 32)"), "wanted");
  has(refusal(s, json::parse("{}", "config.json")), "no quantization_config");
}

TEST(TurnWords, LayersOfTwoSchemesAreNamed) {
  const Source wide = {.less = 1, .only_zero = 8},
               narrow = {.group = 16, .less = 1, .only_zero = 8};
  const auto a = open(file_of(wide), config_of(wide)), b = open(file_of(narrow), config_of(narrow));
  const std::vector<Conversion> both = {turned(find(a->weights, "x.weight"), config_of(wide)),
                                        turned(find(b->weights, "x.weight"), config_of(narrow))};
  EXPECT_NE(error_of([&] { turned_config(both); }).find("groups of 16"), std::string::npos);
}

}  // namespace
}  // namespace monograph
