// A value of YAML that stands in one line: a scalar, `[a, b]` or `{a: b}`.
#pragma once

#include <string_view>

#include "monograph/train/recipe_value.h"

namespace monograph::train {

// A plain scalar by YAML 1.1's rules. Throws Error for what those make of it and no recipe needs:
// numbers in other bases, dates, infinities, merge keys.
RecipeValue plain_scalar(std::string_view text);

// `text`, a comment behind it passed over. Throws Error for what is no such value, or goes on in
// another line.
RecipeValue inline_value(std::string_view text);

// The colon behind the key that a line begins with; npos if it begins with none.
std::size_t colon_of_key(std::string_view line);
// The key in front of it. Throws Error if YAML reads it as anything but text.
std::string key_in(std::string_view text);

}  // namespace monograph::train
