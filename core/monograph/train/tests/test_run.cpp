// What a run is made of besides the model: recipe, schedule, order of the rows.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>

#include "monograph/base/error.h"
#include "monograph/train/batch.h"
#include "monograph/train/recipe.h"
#include "monograph/train/recipe_text.h"
#include "monograph/train/row_order.h"
#include "monograph/train/schedule.h"
#include "monograph/train/target_modules.h"

namespace monograph::train {
namespace {

const std::string kLeast = "base_model: folder\nadapter: qlora\nlora_target_linear: true\n";

std::string error(const std::string& text) {
  try {
    read_recipe(text, "r.yml");
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(RecipeText, ScalarsListsAndMappings) {
  const auto entries = parse_recipe(
      "---\n# a comment\na: 1e-4  # another\nb: 'x # y'\nc: [p, \"q\"]\nd:\n  - r\n  - s\n"
      "e:\n  - path: z\n    type: {u: [1, 'v']}\n  - {path: w}\nf: {g: 1}\nh:\ni: null\n",
      "r.yml");
  ASSERT_EQ(entries.size(), 8u);
  EXPECT_EQ(entries[0].value.text, "1e-4");
  EXPECT_EQ(number_in(entries[0].value.text), 1e-4);
  EXPECT_EQ(entries[0].line, 3u);
  EXPECT_EQ(entries[1].value.text, "x # y");
  EXPECT_EQ(shown(entries[2].value), "[p, q]");
  EXPECT_EQ(shown(entries[3].value), "[r, s]");
  EXPECT_EQ(json::dump_line(as_json(entries[4].value)),
            R"([{"path": "z", "type": {"u": [1, "v"]}}, {"path": "w"}])");
  EXPECT_EQ(shown(entries[5].value), "{g: 1}");
  EXPECT_TRUE(entries[6].value.asks_for_nothing() && entries[7].value.asks_for_nothing());
  for (const char* word : {"nan", "inf", "-inf", ".", "1_000", "0x10", "1 2", "", "1e999"})
    EXPECT_FALSE(number_in(word)) << word;
}

// YAML reads each of these otherwise, or not at all.
TEST(RecipeText, WhatIsNoRecipeIsNamedWithItsLine) {
  const std::string nested = "datasets:\n  - path: a\n    type: b\n";
  for (const std::string& text : {nested + "  lora_r: 8\n",       nested + " lora_r: 8\n",
                                  nested + "---\nseed: 7\n",      std::string("a: 1\n  b: 2\n"),
                                  std::string("a: [x]\n  - y\n"), std::string("a:\n  - x\n - y\n"),
                                  std::string("a: {}\n  b: 1\n"), std::string("a: 012\n"),
                                  std::string("a: 1:30\n"),       std::string("a: .inf\n"),
                                  std::string("a: 2026-01-31\n"), std::string("a: \tb\n"),
                                  std::string("a: b: c\n"),       std::string("on: 1\n"),
                                  std::string("a: 'b\n"),         std::string("a: \"\\z\"\n"),
                                  std::string("a: x\n  y\n"),     std::string("a: {b: 1, b: 2}\n"),
                                  std::string("a: \xff\n"),       std::string("a: x\x01\n")})
    EXPECT_THROW(parse_recipe(text, "r.yml"), Error) << text;
  EXPECT_EQ(parse_recipe(nested + "  - path: c\r\nlora_r: 8\r\n", "r.yml").back().key, "lora_r");
  EXPECT_EQ(parse_recipe("datasets:\n- path: a\n  type: b\nlora_r: 8\n", "r.yml").size(), 2u);
}

TEST(Recipe, WhatThePythonTrainerRefuses) {
  const std::string base = "base_model: m\nadapter: qlora\n";
  for (const std::string& more :
       {std::string("lora_target_linear: false\n"), std::string(""),
        std::string("lora_target_linear: true\nlora_r: 010\n"),
        std::string("lora_target_linear: true\nlora_r: 4.0\n"),
        std::string("lora_target_linear: true\nwarmup_ratio: 1.0\n"),
        std::string("lora_target_linear: true\nsave_strategy: steps\n"),
        std::string("lora_target_linear: true\nsave_strategy: no\nsave_steps: 1\n"),
        std::string("lora_target_linear: true\nsaves_per_epoch: 2\nsave_strategy: epoch\n"),
        std::string("lora_target_linear: true\nlr_scheduler: linear\ncosine_min_lr_ratio: 0.3\n")})
    EXPECT_THROW(read_recipe(base + more, "r.yml"), Error) << more;
  const std::string named = "lora_target_linear: false\nlora_target_modules: [q_proj]\n";
  EXPECT_EQ(read_recipe(base + named, "r.yml").lora.targets.names.size(), 1u);
}

TEST(Recipe, DefaultsAndEveryMistakeAtOnce) {
  const Recipe recipe = read_recipe(kLeast + "gradient_accumulation_steps: 3\n", "r.yml");
  EXPECT_EQ(recipe.lora.rank, 16u);
  EXPECT_EQ(recipe.lora.alpha, 32);
  EXPECT_EQ(recipe.seed, 42u);
  EXPECT_EQ(recipe.leaves(), 3u);
  EXPECT_EQ(recipe.dtype, DType::kBFloat16);
  const std::string both = error(kLeast + "lora_r: -1\nrl: dpo\n");
  EXPECT_NE(both.find("r.yml: lora_r is -1"), std::string::npos);
  EXPECT_NE(both.find("r.yml: line 5: rl is not a key"), std::string::npos);
  EXPECT_NE(error("adapter: lora\n").find("base_model is missing"), std::string::npos);
  EXPECT_NE(error(kLeast + "lora_dropout: 1\n").find("lora_dropout is 1"), std::string::npos);
}

TEST(Recipe, WhatItSaysOfTokensHasNoDefaults) {
  const Recipe recipe = read_recipe(
      kLeast +
          "train_on_inputs: false\nchat_template:\nmin_sample_len: 3\nspecial_tokens: {pad_token: "
          "x, "
          "unk_token: }\ndatasets:\n- path: a\n  split_thinking: no\n  field:\n  shards: 2\n",
      "r.yml");
  EXPECT_EQ(
      json::dump_line(recipe.said_of_tokens),
      R"({"min_sample_len": 3, "special_tokens": {"pad_token": "x"}, "datasets": [{"path": "a", )"
      R"("shards": 2}], "sequence_len": 2048})");
  EXPECT_NE(error(kLeast + "datasets: a.jsonl\n").find("datasets is a.jsonl"), std::string::npos);
  EXPECT_NE(error(kLeast + "chat_template_jinja: no_such_file\n").find("there is no such file"),
            std::string::npos);
}

TEST(Recipe, ExpressionsOfModules) {
  for (const char* wrong : {"(?i)q_proj", "[[:alpha:]]+", "a{2}", "a++", "\\bq", "(?=q)q", "[^q]",
                            "(", "\\1", "[]a]", "[a", "q\\"})
    EXPECT_THROW(compile_pattern(wrong), Error) << wrong;
  TargetModules targets;
  targets.pattern = R"(model\.layers\.[\d]+\.(self_attn|mlp)\.(q|up)_proj)";
  EXPECT_NO_THROW(check_takes_projections_alone(targets, 3));
  EXPECT_FALSE(targets.takes_all());
  for (const char* more :
       {".*", "(lm_head|.*q_proj)", "model.layers.2.mlp", ".*norm", ".*post_feed.*"}) {
    targets.pattern = more;
    EXPECT_THROW(check_takes_projections_alone(targets, 3), Error) << more;
  }
  EXPECT_TRUE(ends_with_name("a.b.q_proj", "b.q_proj") && !ends_with_name("a.bq_proj", "q_proj"));
}

TEST(Schedule, RisesAndFalls) {
  ScheduleSettings s;
  s.learning_rate = 1;
  s.warmup_steps = 4;
  EXPECT_EQ(learning_rate(s, 0, 20), 0.25);
  EXPECT_EQ(learning_rate(s, 3, 20), 1);
  EXPECT_EQ(learning_rate(s, 4, 20), 1);
  EXPECT_NEAR(learning_rate(s, 12, 20), 0.5, 1e-15);
  s.name = "linear";
  EXPECT_EQ(learning_rate(s, 12, 20), 0.5);
  s.name = "constant";
  EXPECT_EQ(learning_rate(s, 0, 20), 1);
  s.name = "inverse_sqrt";
  EXPECT_EQ(learning_rate(s, 16, 20), 1 / std::sqrt(4.0));
  s.name = "wsd";
  EXPECT_EQ(learning_rate(s, 17, 20), 1);
  EXPECT_NEAR(learning_rate(s, 19, 20), 0.5, 1e-15);
}

TEST(Schedule, EventsFallWhereTheKeysSay) {
  const Epochs epochs = {{10, 7}, 10};
  using Steps = std::set<std::size_t>;
  EXPECT_EQ(event_steps(epochs, 2, 0), (Steps{5, 10, 14, 17}));
  EXPECT_EQ(event_steps(epochs, 0, 6), (Steps{6, 12}));
  EXPECT_EQ(event_steps(epochs, 0, 0.25), (Steps{4, 8, 12, 16}));
  EXPECT_EQ(event_steps(epochs, 0, 0), Steps{});
  EXPECT_EQ(epochs.place(10).epoch, 1u);
  EXPECT_EQ(epochs.place(16).step, 6u);
  EXPECT_DOUBLE_EQ(epochs.share(17), 1.7);
}

TEST(RowOrder, EveryDocumentOnceAnEpoch) {
  const std::vector<std::int64_t> lengths = {5, 9, 1, 7, 3, 3, 8, 2, 10, 4, 6};
  RowOrderSettings settings;
  settings.capacity = 10;
  settings.max_documents = 4;
  settings.rows_per_batch = 2;
  settings.batches_per_step = 2;
  RowOrder order(lengths, settings);
  std::vector<std::vector<std::size_t>> epochs;
  for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
    std::vector<std::size_t>& seen = epochs.emplace_back();
    for (std::size_t step = 0; step < order.steps(epoch); ++step)
      for (const auto& batch : order.step(epoch, step)) {
        std::int64_t tokens = 0;
        for (const std::size_t document : batch) tokens += lengths[document];
        EXPECT_LE(tokens, 20);
        seen.insert(seen.end(), batch.begin(), batch.end());
      }
    EXPECT_EQ(std::set<std::size_t>(seen.begin(), seen.end()).size(), lengths.size());
    EXPECT_EQ(seen.size(), lengths.size());
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_TRUE(order.step(0, order.steps(0)).empty());
  EXPECT_THROW(RowOrder({11}, settings).steps(0), Error);
}

TEST(RowOrder, AStepMayBeLargerThanTheEpochByFar) {
  RowOrderSettings settings;
  settings.capacity = 10;
  settings.batches_per_step = 1'000'000'000'000;
  RowOrder order({9, 8, 7}, settings);
  EXPECT_EQ(order.steps(0), 1u);
  EXPECT_EQ(order.step(0, 0).size(), 3u);
}

TEST(Batch, MoreTokensThan32BitsCountAreRefused) {
  const std::int32_t tokens[] = {1, 2, 3};
  const Document document = {tokens, tokens};
  EXPECT_THROW(packed_batch({&document, 1}, std::size_t{1} << 31, 0), Error);
  EXPECT_THROW(padded_batch({&document, 1}, std::size_t{1} << 40, std::size_t{1} << 30, 0), Error);
  EXPECT_EQ(padded_batch({&document, 1}, 2, 8, 0).tokens(), 16u);
}

}  // namespace
}  // namespace monograph::train
