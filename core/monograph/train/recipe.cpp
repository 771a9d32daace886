#include "monograph/train/recipe.h"

#include <map>
#include <set>

#include "monograph/base/error.h"
#include "monograph/train/recipe_keys.h"
#include "monograph/train/recipe_text.h"
#include "monograph/train/token_recipe.h"
#include "monograph/train/unread_keys.h"

namespace monograph::train {
namespace {

void check_together(const Recipe& r, const std::set<std::string>& written) {
  const auto has = [&](const char* key) { return written.contains(key); };
  if (!has("base_model")) throw Error("base_model is missing, wanted the folder of the model");
  if (!has("adapter")) throw Error("adapter is missing, wanted qlora or lora");
  if (!r.all_linear && !has("lora_target_modules"))
    throw Error("lora_target_modules is missing, wanted it or lora_target_linear: true");
  if (r.all_linear && has("lora_target_modules") && r.lora.targets.names.empty())
    throw Error(
        "lora_target_modules is no list of names and stands beside lora_target_linear, wanted one "
        "of "
        "them");
  if (r.in_4_bits && *r.in_4_bits != r.packed_base)
    throw Error(std::string("load_in_4bit is ") + (*r.in_4_bits ? "true" : "false") +
                " and adapter is " + (r.packed_base ? "qlora" : "lora") +
                ", wanted adapter: " + (*r.in_4_bits ? "qlora" : "lora"));
  if ((r.attention == "sdpa" || r.attention == "eager") && !r.sample_packing)
    throw Error("attn_implementation is " + r.attention + ", wanted monograph");
  if (r.schedule.warmup_steps.value_or(0) > 0 && r.schedule.warmup_ratio.value_or(0) > 0)
    throw Error("warmup_ratio stands beside warmup_steps, wanted one of them");
  if (has("cosine_min_lr_ratio") && r.schedule.name != "cosine" && r.schedule.name != "rex")
    throw Error("cosine_min_lr_ratio stands beside lr_scheduler: " + r.schedule.name +
                ", wanted cosine or rex");
  const bool often = r.save_steps > 0 || r.saves_per_epoch > 0;
  if ((r.save_strategy == "no" || r.save_strategy == "epoch") && often)
    throw Error("save_strategy is " + r.save_strategy +
                " beside save_steps or saves_per_epoch, wanted one of them");
  if (r.save_strategy == "steps" && !often)
    throw Error("save_strategy is steps and save_steps is missing, wanted save_steps: 500");
  if (r.save_strategy == "no" && r.save_first_step)
    throw Error("save_strategy is no and save_first_step true, wanted one of them");
  if (r.save_steps > 0 && r.saves_per_epoch > 0)
    throw Error("save_steps stands beside saves_per_epoch, wanted one of them");
}

}  // namespace

Recipe read_recipe(std::string_view text, const std::string& source) {
  Recipe recipe;
  recipe.said_of_tokens = json::Value::object();
  std::map<std::string, TakeEntry> keys = keys_of_model(recipe);
  keys.merge(keys_of_steps(recipe));
  keys.merge(keys_of_checkpoints(recipe));
  std::set<std::string> seen, written;
  std::string errors;
  const auto found = [&](const std::string& what) {
    errors += (errors.empty() ? "" : "\n") + source + ": " + what;
  };
  for (RecipeEntry& entry : parse_recipe(text, source)) {
    const std::string name = first_name(entry.key);
    const auto key = keys.find(name);
    const bool nothing = entry.value.asks_for_nothing();
    try {
      if (!seen.insert(name).second) throw Error(entry.key + " is written twice, also as " + name);
      entry.key = name;
      if (const char* const why = reason_to_ignore(name)) {
        if (*why != '\0' && !nothing) recipe.notices.push_back(name + ": ignored; " + why);
        continue;
      }
      if (may_ask_for_nothing(name) && nothing) continue;
      if (is_of_tokens(name)) add_to_said(recipe.said_of_tokens, entry);
      if (is_of_tokens(name) && key == keys.end()) continue;
      if (key == keys.end())
        throw Error("line " + std::to_string(entry.line) + ": " + name +
                    " is not a key that the native trainer honours; leave it out, or run "
                    "`monograph train`");
      if (entry.value.is(RecipeValue::Kind::kNull)) continue;
      written.insert(name);
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
  recipe.said_of_tokens.set("sequence_len", json::Value::number(recipe.sequence_len));
  if (recipe.all_linear) recipe.lora.targets.all = true;
  return recipe;
}

}  // namespace monograph::train
