// What somebody who mistyped a name meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace monograph::cli {

// Of these names the nearest to `word`; empty if none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& names);

}  // namespace monograph::cli
