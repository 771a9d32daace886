// What a recipe says of its documents, their tokens and targets, in the form in which
// `monograph preprocess --tokens` keeps it in the file
// (python/monograph/recipe/data/token_file.py).
#pragma once

#include <string>

#include "monograph/train/recipe_value.h"
#include "monograph/train/token_file.h"

namespace monograph::train {

// Whether a key decides which documents there are, or what their tokens and targets are.
bool is_of_tokens(const std::string& key);

// Puts what `entry` says into `said`, a JSON object; what stands at its default is left out. Throws
// Error for a value that Python's reader refuses by its type.
void add_to_said(json::Value& said, const RecipeEntry& entry);

// Throws Error that names the first key in which the recipe of the file and `said` differ, with
// both values; or the file of the tokenizer in `base_model` that is another one.
void check_same_tokens(const TokenFile& tokens, const json::Value& said,
                       const std::string& base_model);

}  // namespace monograph::train
