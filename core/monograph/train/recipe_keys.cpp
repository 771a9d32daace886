#include "monograph/train/recipe_keys.h"

#include <algorithm>
#include <cmath>

#include "monograph/base/error.h"

namespace monograph::train {
namespace {

using Kind = RecipeValue::Kind;

[[noreturn]] void wrong(const RecipeEntry& entry, const std::string& wanted) {
  throw Error(entry.key + " is " + shown(entry.value) + ", wanted " + wanted);
}

// A number, or a text that is one: 2e-4 is text to YAML.
double number(const RecipeEntry& entry, double least, double most, const char* wanted) {
  const RecipeValue& value = entry.value;
  std::optional<double> found;
  if (value.is(Kind::kWhole) || value.is(Kind::kNumber)) found = value.number;
  if (value.is(Kind::kText)) found = number_in(value.text);
  if (!found || !(*found >= least) || !(*found <= most)) wrong(entry, wanted);
  return *found;
}

// Beyond 2^53 a checkpoint's JSON would not hold it in every reader.
std::size_t count(const RecipeEntry& entry, std::int64_t least = 1,
                  std::int64_t most = std::int64_t{1} << 53) {
  if (!entry.value.is(Kind::kWhole) || entry.value.whole < least || entry.value.whole > most)
    wrong(entry, "a whole number, " + std::to_string(least) + " or more" +
                     (entry.value.is(Kind::kWhole) && entry.value.whole > most
                          ? ", at most " + std::to_string(most)
                          : ""));
  return static_cast<std::size_t>(entry.value.whole);
}

bool flag(const RecipeEntry& entry) {
  if (!entry.value.is(Kind::kBool)) wrong(entry, "true or false");
  return entry.value.truth;
}

const std::string& text(const RecipeEntry& entry, const std::string& wanted) {
  if (!entry.value.is(Kind::kText) || entry.value.text.empty()) wrong(entry, wanted);
  return entry.value.text;
}

std::string path(const RecipeEntry& entry, const char* wanted) {
  const std::string& found = text(entry, wanted);
  if (found[0] == '~') wrong(entry, "the folder written out: no shell reads a ~ here");
  return found;
}

std::string word(const RecipeEntry& entry, std::initializer_list<const char*> words) {
  std::string wanted;
  for (const char* each : words) wanted += (wanted.empty() ? "" : " or ") + std::string(each);
  const std::string& found = text(entry, wanted);
  if (std::find(words.begin(), words.end(), found) == words.end()) wrong(entry, wanted);
  return found;
}

void take_targets(const RecipeEntry& entry, TargetModules& targets) {
  const char* const wanted = "a list of names, [q_proj, v_proj], all-linear or an expression";
  if (entry.value.is(Kind::kText)) {
    std::string lower = text(entry, wanted);
    for (char& c : lower) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    if (lower == "all-linear") {
      targets.all = true;
      return;
    }
    targets.pattern = entry.value.text;
    compile_pattern(targets.pattern);
    return;
  }
  if (!entry.value.is(Kind::kList) || entry.value.items.empty()) wrong(entry, wanted);
  for (const RecipeValue& item : entry.value.items) {
    if (!item.is(Kind::kText) || item.text.empty()) wrong(entry, wanted);
    targets.names.push_back(item.text);
  }
}

// Names of attention that monograph train computes by its own, too.
bool is_own_attention(const std::string& name) {
  for (const char* known :
       {"flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", "xformers",
        "sage", "sdpa_varlen", "kernels-community/"})
    if (name.starts_with(known)) return true;
  return name == "monograph";
}

}  // namespace

std::map<std::string, TakeEntry> keys_of_model(Recipe& r) {
  using E = const RecipeEntry&;
  constexpr double kMost = 1e300;
  return {
      {"base_model", [&](E e) { r.base_model = path(e, "a folder"); }},
      {"output_dir", [&](E e) { r.output_dir = path(e, "a folder"); }},
      {"adapter",
       [&](E e) {
         r.packed_base = word(e, {"qlora", "lora"}) == "qlora";
       }},
      {"load_in_4bit", [&](E e) { r.in_4_bits = flag(e); }},
      {"bf16",
       [&](E e) {
         const bool on = e.value.is(Kind::kText) ? !word(e, {"auto", "full"}).empty() : flag(e);
         r.dtype = on ? DType::kBFloat16 : DType::kFloat32;
       }},
      {"fp16",
       [&](E e) {
         if (flag(e)) wrong(e, "false: the native trainer computes in bf16 or fp32");
       }},
      {"attn_implementation",
       [&](E e) {
         r.attention = text(e, "monograph");
         const bool plain = r.attention == "sdpa" || r.attention == "eager";
         if (!plain && !is_own_attention(r.attention)) wrong(e, "monograph");
       }},
      {"device", [&](E e) { word(e, {"cpu"}); }},
      {"trainer", [&](E e) { word(e, {"monograph"}); }},
      {"torch_compile",
       [&](E e) {
         if (e.value.is(Kind::kText))
           word(e, {"auto"});
         else if (flag(e))
           wrong(e, "auto or false: the native trainer has no Inductor");
         else
           r.step_mode = "eager";
       }},
      {"step_mode",
       [&](E e) {
         // torch_compile: false beside it means eager.
         if (word(e, {"graph", "eager"}) == "eager") r.step_mode = "eager";
       }},
      {"lora_r", [&](E e) { r.lora.rank = count(e, 1, 1 << 20); }},
      {"lora_alpha", [&](E e) { r.lora.alpha = number(e, 1e-300, kMost, "a number above 0"); }},
      {"lora_dropout", [&](E e) { r.dropout = number(e, 0, 0.999999, "0 to below 1"); }},
      {"lora_target_linear", [&](E e) { r.all_linear = flag(e); }},
      {"lora_target_modules", [&](E e) { take_targets(e, r.lora.targets); }},
      {"peft_use_rslora", [&](E e) { r.lora.rslora = flag(e); }},
      {"peft_init_lora_weights",
       [&](E e) {
         if (!e.value.is(Kind::kBool) || !e.value.truth) wrong(e, "true");
       }},
      {"seed", [&](E e) { r.seed = count(e, 0); }},
  };
}

std::map<std::string, TakeEntry> keys_of_steps(Recipe& r) {
  using E = const RecipeEntry&;
  constexpr std::int64_t kMost = 1'000'000'000;
  const auto positive = [](E e) { return number(e, 0, 1e300, "0 or more"); };
  const auto share = [](E e) { return number(e, 0, std::nextafter(1.0, 0.0), "0 to below 1"); };
  return {
      {"sequence_len",
       [&](E e) { r.sequence_len = static_cast<std::int64_t>(count(e, 1, kMost)); }},
      {"sample_packing", [&](E e) { r.sample_packing = flag(e); }},
      {"pad_to_sequence_len", [&](E e) { r.pad_to_sequence_len = flag(e); }},
      {"shuffle_merged_datasets", [&](E e) { r.shuffle = flag(e); }},
      {"micro_batch_size", [&](E e) { r.micro_batch_size = count(e, 1, kMost); }},
      {"gradient_accumulation_steps",
       [&](E e) { r.gradient_accumulation_steps = count(e, 1, kMost); }},
      {"virtual_shards", [&](E e) { r.virtual_shards = count(e, 1, kMost); }},
      {"num_epochs", [&](E e) { r.num_epochs = number(e, 1e-9, 1e9, "above 0, up to 1e9"); }},
      {"max_steps",
       [&](E e) {
         const bool endless = e.value.is(Kind::kWhole) && e.value.whole == -1;
         if (!endless && e.value.is(Kind::kWhole) && e.value.whole < 1)
           wrong(e, "1 or more, or -1 for no bound");
         r.max_steps = endless ? std::nullopt : std::optional(count(e, 1, kMost));
       }},
      {"optimizer",
       [&](E e) {
         word(e, {"adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "paged_adamw_32bit",
                  "adamw_8bit", "adamw_bnb_8bit", "adamw_torch_4bit", "adamw_torch_8bit",
                  "paged_adamw_8bit", "adamw_apex_fused", "adamw_anyprecision"});
         for (const char* const part : {"bit", "apex", "any"})
           if (e.value.text.find(part) != std::string::npos &&
               e.value.text != "paged_adamw_32bit") {
             r.notices.push_back("optimizer: " + e.value.text +
                                 " is AdamW with 32-bit moments here; an adapter's are small");
             break;
           }
       }},
      {"learning_rate",
       [&](E e) { r.schedule.learning_rate = number(e, 1e-300, 1e300, "a number above 0"); }},
      {"lr_scheduler",
       [&](E e) {
         const std::string wanted =
             "cosine, linear, constant, constant_with_warmup, inverse_sqrt, rex, wsd";
         r.schedule.name = text(e, wanted);
         if (!is_schedule(r.schedule.name)) wrong(e, wanted);
       }},
      {"cosine_min_lr_ratio", [&, share](E e) { r.schedule.least = share(e); }},
      {"warmup_ratio", [&, share](E e) { r.schedule.warmup_ratio = share(e); }},
      {"warmup_steps",
       [&, positive](E e) {
         const double steps = positive(e);
         if (steps > 1 && steps != std::floor(steps)) wrong(e, "steps, or a share below 1");
         r.schedule.warmup_steps = steps;
       }},
      {"weight_decay", [&, positive](E e) { r.weight_decay = positive(e); }},
      {"adam_beta1", [&, share](E e) { r.adam_beta1 = share(e); }},
      {"adam_beta2", [&, share](E e) { r.adam_beta2 = share(e); }},
      {"adam_epsilon", [&, positive](E e) { r.adam_epsilon = positive(e); }},
      {"max_grad_norm", [&, positive](E e) { r.max_grad_norm = positive(e); }},
      {"gradient_checkpointing",
       [&](E e) {
         const bool words = e.value.is(Kind::kText) && e.value.text == "unsloth";
         r.gradient_checkpointing = words || flag(e);
       }},
      {"max_bad_steps", [&](E e) { r.max_bad_steps = count(e, 1, kMost); }},
      {"logging_steps", [&](E e) { r.logging_steps = count(e, 1, kMost); }},
  };
}

std::map<std::string, TakeEntry> keys_of_checkpoints(Recipe& r) {
  using E = const RecipeEntry&;
  constexpr std::int64_t kMost = 1'000'000'000;
  return {
      {"save_strategy",
       [&](E e) {
         // YAML reads the word no as false.
         const bool none = e.value.is(Kind::kBool) && !e.value.truth;
         r.save_strategy = none ? "no" : word(e, {"no", "steps", "epoch"});
       }},
      {"saves_per_epoch", [&](E e) { r.saves_per_epoch = count(e, 0, kMost); }},
      {"save_steps", [&](E e) { r.save_steps = number(e, 0, 1e9, "0 or more"); }},
      {"save_total_limit", [&](E e) { r.save_total_limit = count(e, 0, kMost); }},
      {"save_first_step", [&](E e) { r.save_first_step = flag(e); }},
      {"resume_from_checkpoint",
       [&](E e) {
         if (e.value.is(Kind::kBool))
           r.resume_from = e.value.truth ? "auto" : "";
         else
           r.resume_from = path(e, "a folder, auto, true or false");
       }},
      {"auto_resume_from_checkpoints", [&](E e) { r.auto_resume = flag(e); }},
  };
}

}  // namespace monograph::train
