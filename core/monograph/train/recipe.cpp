#include "monograph/train/recipe.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "monograph/base/error.h"
#include "monograph/train/recipe_text.h"

namespace monograph::train {
namespace {

// What they say is in the token file.
constexpr const char* kOfTheTokens[] = {
    "chat_template",          "chat_template_jinja", "chat_template_kwargs",
    "dataset_prepared_path",  "dataset_processes",   "datasets",
    "default_system_message", "eot_tokens",          "excess_length_strategy",
    "min_sample_len",         "tokenizer_config",    "train_on_inputs",
};

[[noreturn]] void wrong(const RecipeEntry& entry, const std::string& wanted) {
  std::string found;
  for (const RecipeScalar& item : entry.items) found += (found.empty() ? "" : ", ") + item.text;
  if (entry.nested) found = "a mapping";
  if (entry.list) found = "[" + found + "]";
  throw Error(entry.key + " is " + (found.empty() ? "empty" : found) + ", wanted " + wanted);
}

const RecipeScalar& one(const RecipeEntry& entry, const std::string& wanted) {
  if (entry.list || entry.nested || entry.items.size() != 1) wrong(entry, wanted);
  return entry.items[0];
}

bool is_null(const RecipeEntry& entry) {
  return !entry.list && !entry.nested && (entry.items.empty() || entry.items[0].is_null());
}

double number(const RecipeEntry& entry, double least, double most, const char* wanted) {
  const std::optional<double> found = one(entry, wanted).as_number();
  if (!found || !(*found >= least) || !(*found <= most)) wrong(entry, wanted);
  return *found;
}

std::size_t count(const RecipeEntry& entry, std::size_t least = 1) {
  const std::string wanted = "a whole number, " + std::to_string(least) + " or more";
  const double found = number(entry, static_cast<double>(least), 1e9, wanted.c_str());
  if (entry.items[0].text.find_first_not_of("+0123456789") != std::string::npos)
    wrong(entry, wanted);
  return static_cast<std::size_t>(found);
}

bool flag(const RecipeEntry& entry) {
  const std::optional<bool> found = one(entry, "true or false").as_bool();
  if (!found) wrong(entry, "true or false");
  return *found;
}

std::string word(const RecipeEntry& entry, std::initializer_list<const char*> words) {
  std::string wanted;
  for (const char* each : words) wanted += (wanted.empty() ? "" : " or ") + std::string(each);
  const std::string& found = one(entry, wanted).text;
  if (std::find(words.begin(), words.end(), found) == words.end()) wrong(entry, wanted);
  return found;
}

// A key whose only right value is that of the native trainer.
auto must(bool value) {
  return [value](const RecipeEntry& entry) {
    if (flag(entry) != value) wrong(entry, value ? "true" : "false");
  };
}

using Take = std::function<void(const RecipeEntry&)>;

std::map<std::string, Take> keys_of_model(Recipe& r) {
  constexpr double kMost = 1e300;
  return {
      {"base_model", [&](const RecipeEntry& e) { r.base_model = one(e, "a folder").text; }},
      {"output_dir", [&](const RecipeEntry& e) { r.output_dir = one(e, "a folder").text; }},
      {"adapter",
       [&](const RecipeEntry& e) {
         r.packed_base = word(e, {"qlora", "lora"}) == "qlora";
       }},
      {"load_in_4bit", must(true)},
      {"bf16",
       [&](const RecipeEntry& e) {
         const std::string& text = one(e, "auto, true or false").text;
         const bool named = text == "auto" || text == "full";
         r.dtype = named || flag(e) ? DType::kBFloat16 : DType::kFloat32;
       }},
      {"fp16", must(false)},
      {"attn_implementation", [&](const RecipeEntry& e) { word(e, {"monograph"}); }},
      {"device", [&](const RecipeEntry& e) { word(e, {"cpu"}); }},
      {"trainer", [&](const RecipeEntry& e) { word(e, {"monograph"}); }},
      {"torch_compile",
       [&](const RecipeEntry& e) {
         word(e, {"auto", "false", "False"});
       }},
      {"step_mode",
       [&](const RecipeEntry& e) {
         word(e, {"graph", "eager"});
       }},
      {"lora_r", [&](const RecipeEntry& e) { r.lora.rank = count(e); }},
      {"lora_alpha",
       [&](const RecipeEntry& e) { r.lora.alpha = number(e, 1e-300, kMost, "a number above 0"); }},
      {"lora_dropout",
       [&](const RecipeEntry& e) { r.dropout = number(e, 0, 0.999999, "0 to below 1"); }},
      {"lora_target_linear", [&](const RecipeEntry& e) { r.all_linear = flag(e); }},
      {"lora_target_modules",
       [&](const RecipeEntry& e) {
         if (!e.list || e.items.empty()) wrong(e, "a list of names, [q_proj, v_proj]");
         for (const RecipeScalar& item : e.items) r.lora.targets.push_back(item.text);
       }},
      {"peft_use_rslora", [&](const RecipeEntry& e) { r.lora.rslora = flag(e); }},
      {"seed", [&](const RecipeEntry& e) { r.seed = count(e, 0); }},
  };
}

std::map<std::string, Take> keys_of_steps(Recipe& r) {
  const auto positive = [](const RecipeEntry& e) { return number(e, 0, 1e300, "0 or more"); };
  const auto share = [](const RecipeEntry& e) {
    return number(e, 0, std::nextafter(1.0, 0.0), "0 to below 1");
  };
  return {
      {"sequence_len",
       [&](const RecipeEntry& e) { r.sequence_len = static_cast<std::int64_t>(count(e)); }},
      {"sample_packing", [&](const RecipeEntry& e) { r.sample_packing = flag(e); }},
      {"pad_to_sequence_len", [&](const RecipeEntry& e) { r.pad_to_sequence_len = flag(e); }},
      {"shuffle_merged_datasets", [&](const RecipeEntry& e) { r.shuffle = flag(e); }},
      {"micro_batch_size", [&](const RecipeEntry& e) { r.micro_batch_size = count(e); }},
      {"gradient_accumulation_steps",
       [&](const RecipeEntry& e) { r.gradient_accumulation_steps = count(e); }},
      {"virtual_shards", [&](const RecipeEntry& e) { r.virtual_shards = count(e); }},
      {"num_epochs", [&](const RecipeEntry& e) { r.num_epochs = number(e, 1e-9, 1e9, "above 0"); }},
      {"max_steps", [&](const RecipeEntry& e) { r.max_steps = count(e); }},
      {"optimizer",
       [&](const RecipeEntry& e) {
         word(e, {"adamw_torch", "adamw_torch_fused"});
       }},
      {"learning_rate",
       [&](const RecipeEntry& e) {
         r.schedule.learning_rate = number(e, 1e-300, 1e300, "a number above 0");
       }},
      {"lr_scheduler",
       [&](const RecipeEntry& e) {
         const std::string wanted =
             "cosine, linear, constant, constant_with_warmup, inverse_sqrt, rex, wsd";
         r.schedule.name = one(e, wanted).text;
         if (!is_schedule(r.schedule.name)) wrong(e, wanted);
       }},
      {"cosine_min_lr_ratio", [&, share](const RecipeEntry& e) { r.schedule.least = share(e); }},
      {"warmup_ratio", [&, share](const RecipeEntry& e) { r.schedule.warmup_ratio = share(e); }},
      {"warmup_steps",
       [&, positive](const RecipeEntry& e) { r.schedule.warmup_steps = positive(e); }},
      {"weight_decay", [&, positive](const RecipeEntry& e) { r.weight_decay = positive(e); }},
      {"adam_beta1", [&, share](const RecipeEntry& e) { r.adam_beta1 = share(e); }},
      {"adam_beta2", [&, share](const RecipeEntry& e) { r.adam_beta2 = share(e); }},
      {"adam_epsilon", [&, positive](const RecipeEntry& e) { r.adam_epsilon = positive(e); }},
      {"max_grad_norm", [&, positive](const RecipeEntry& e) { r.max_grad_norm = positive(e); }},
      {"gradient_checkpointing", [&](const RecipeEntry& e) { r.gradient_checkpointing = flag(e); }},
      {"max_bad_steps", [&](const RecipeEntry& e) { r.max_bad_steps = count(e); }},
      {"logging_steps", [&](const RecipeEntry& e) { r.logging_steps = count(e); }},
  };
}

std::map<std::string, Take> keys_of_checkpoints(Recipe& r) {
  return {
      {"save_strategy",
       [&](const RecipeEntry& e) {
         const std::string when = word(e, {"no", "false", "steps", "epoch"});
         r.save_strategy = when == "false" ? "no" : when;
       }},
      {"saves_per_epoch", [&](const RecipeEntry& e) { r.saves_per_epoch = count(e); }},
      {"save_steps", [&](const RecipeEntry& e) { r.save_steps = number(e, 1e-9, 1e9, "above 0"); }},
      {"save_total_limit", [&](const RecipeEntry& e) { r.save_total_limit = count(e, 0); }},
      {"save_first_step", [&](const RecipeEntry& e) { r.save_first_step = flag(e); }},
      {"resume_from_checkpoint",
       [&](const RecipeEntry& e) {
         const RecipeScalar& value = one(e, "a folder, auto, true or false");
         const std::optional<bool> on = value.as_bool();
         r.resume_from = !on ? value.text : *on ? "auto" : "";
       }},
      {"auto_resume_from_checkpoints", [&](const RecipeEntry& e) { r.auto_resume = flag(e); }},
  };
}

void check_together(const Recipe& r, const std::set<std::string>& written) {
  const auto has = [&](const char* key) { return written.contains(key); };
  if (!has("base_model")) throw Error("base_model is missing, wanted the folder of the model");
  if (!has("adapter")) throw Error("adapter is missing, wanted qlora or lora");
  if (!r.all_linear && !has("lora_target_modules"))
    throw Error("lora_target_modules is missing, wanted it or lora_target_linear: true");
  if (r.all_linear && has("lora_target_modules"))
    throw Error("lora_target_modules stands beside lora_target_linear, wanted one of them");
  if (has("load_in_4bit") && !r.packed_base)
    throw Error("load_in_4bit is true and adapter is lora, wanted adapter: qlora");
  if (has("warmup_steps") && has("warmup_ratio"))
    throw Error("warmup_ratio stands beside warmup_steps, wanted one of them");
  if (has("cosine_min_lr_ratio") && r.schedule.name != "cosine" && r.schedule.name != "rex")
    throw Error("cosine_min_lr_ratio stands beside lr_scheduler: " + r.schedule.name +
                ", wanted cosine or rex");
  const bool often = has("save_steps") || has("saves_per_epoch");
  if ((r.save_strategy == "no" || r.save_strategy == "epoch") && often)
    throw Error("save_strategy is " + r.save_strategy +
                " beside save_steps or saves_per_epoch, wanted one of them");
  if (r.save_strategy == "steps" && !often)
    throw Error("save_strategy is steps and save_steps is missing, wanted save_steps: 500");
  if (r.save_strategy == "no" && r.save_first_step)
    throw Error("save_strategy is no and save_first_step true, wanted one of them");
  if (has("save_steps") && has("saves_per_epoch"))
    throw Error("save_steps stands beside saves_per_epoch, wanted one of them");
}

}  // namespace

Recipe read_recipe(std::string_view text, const std::string& source) {
  Recipe recipe;
  std::map<std::string, Take> keys = keys_of_model(recipe);
  keys.merge(keys_of_steps(recipe));
  keys.merge(keys_of_checkpoints(recipe));
  std::set<std::string> written;
  std::string errors;
  const auto found = [&](const std::string& what) {
    errors += (errors.empty() ? "" : "\n") + source + ": " + what;
  };
  for (const RecipeEntry& entry : parse_recipe(text, source)) {
    if (std::find(std::begin(kOfTheTokens), std::end(kOfTheTokens), entry.key) !=
        std::end(kOfTheTokens))
      continue;
    const auto key = keys.find(entry.key);
    try {
      if (key == keys.end())
        throw Error("line " + std::to_string(entry.line) + ": " + entry.key +
                    " is not a key that the native trainer honours; leave it out, or run "
                    "`monograph train`");
      if (is_null(entry)) continue;
      written.insert(entry.key);
      key->second(entry);
    } catch (const Error& error) {
      found(error.what());
    }
  }
  if (errors.empty()) {
    try {
      check_together(recipe, written);
    } catch (const Error& error) {
      found(error.what());
    }
  }
  if (!errors.empty()) throw Error(errors);
  return recipe;
}

}  // namespace monograph::train
