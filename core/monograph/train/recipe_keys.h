// Every key that the native trainer reads: what a value must be, and where it goes.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "monograph/train/recipe.h"
#include "monograph/train/recipe_value.h"

namespace monograph::train {

using TakeEntry = std::function<void(const RecipeEntry&)>;

// Each throws Error that names the key, the value and what is wanted.
std::map<std::string, TakeEntry> keys_of_model(Recipe& recipe);
std::map<std::string, TakeEntry> keys_of_steps(Recipe& recipe);
std::map<std::string, TakeEntry> keys_of_checkpoints(Recipe& recipe);

}  // namespace monograph::train
