// The part of YAML that recipes are written in, read as PyYAML reads it: `key: value` lines, lists
// of lines `- a` and mappings further in, scalars, `[a, b]` and `{a: b}` in one line, comments.
// Anchors, tags, block scalars, values over several lines and files of several documents are errors
// with their line.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "monograph/train/recipe_value.h"

namespace monograph::train {

// Throws Error that names `source` and the line. No key stands twice.
std::vector<RecipeEntry> parse_recipe(std::string_view text, const std::string& source);

}  // namespace monograph::train
