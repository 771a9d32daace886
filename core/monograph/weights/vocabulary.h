// Input embedding and head of a model, and the rows that new tokens add to them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace monograph {

// By the names that checkpoints have for them: model.embed_tokens.weight, lm_head.weight ...
bool is_input_embedding(std::string_view weight);
bool is_head(std::string_view weight);

// How many rows trained tokens add to a weight that has `rows`: none if all are rows of it. What is
// added must be trained whole, since nothing else says its values: `missing` is then empty, else
// the problem.
struct NewRows {
  std::uint64_t count = 0;
  std::string missing;
};
NewRows rows_of_new_tokens(const std::vector<std::uint64_t>& tokens, std::uint64_t rows);

}  // namespace monograph
