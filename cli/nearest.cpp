#include "nearest.h"

#include <algorithm>
#include <cstddef>

namespace monograph::cli {
namespace {

// More than this many letters, and it was no mistake in typing.
constexpr std::size_t kFarthest = 2;

// Letters to insert, remove, replace, or exchange with the next one.
std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> edits(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        edits[i][j] = i + j;
        continue;
      }
      const std::size_t replaced = edits[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      edits[i][j] = std::min({edits[i - 1][j] + 1, edits[i][j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        edits[i][j] = std::min(edits[i][j], edits[i - 2][j - 2] + 1);
      }
    }
  }
  return edits[a.size()][b.size()];
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& names) {
  std::string found;
  std::size_t least = kFarthest + 1;
  for (const std::string& name : names) {
    const bool begins = word.size() >= 2 && name.starts_with(word);
    const std::size_t distance = begins ? 1 : edits_between(word, name);
    if (distance < least && distance < name.size()) {
      least = distance;
      found = name;
    }
  }
  return found;
}

}  // namespace monograph::cli
