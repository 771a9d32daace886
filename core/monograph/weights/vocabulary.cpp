#include "monograph/weights/vocabulary.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace monograph {
namespace {

constexpr std::array<std::string_view, 5> kEmbeddings = {
    "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight",
    "embed_in.weight"};
constexpr std::array<std::string_view, 3> kHeads = {"lm_head.weight", "embed_out.weight",
                                                    "output.weight"};

template <std::size_t N>
bool is_one_of(std::string_view name, const std::array<std::string_view, N>& ends) {
  return std::any_of(ends.begin(), ends.end(), [&](std::string_view end) {
    return name == end || (name.ends_with(end) && name[name.size() - end.size() - 1] == '.');
  });
}

}  // namespace

bool is_input_embedding(std::string_view weight) { return is_one_of(weight, kEmbeddings); }
bool is_head(std::string_view weight) { return is_one_of(weight, kHeads); }

NewRows rows_of_new_tokens(const std::vector<std::uint64_t>& tokens, std::uint64_t rows) {
  std::vector<std::uint64_t> beyond;
  std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(beyond),
               [&](std::uint64_t token) { return token >= rows; });
  std::sort(beyond.begin(), beyond.end());
  for (std::size_t i = 0; i < beyond.size(); ++i) {
    if (beyond[i] == rows + i) continue;
    return {0, "token " + std::to_string(beyond[i]) + " is not one of its " + std::to_string(rows) +
                   " rows, and row " + std::to_string(rows + i) + " is not trained"};
  }
  return {beyond.size(), {}};
}

}  // namespace monograph
