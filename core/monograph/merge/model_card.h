// README.md of a merged model: what it was made from, with hashes, and what the merge kept.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "monograph/merge/merge.h"

namespace monograph {

struct CardAdapter {
  std::string name;  // of its folder
  std::string sha256;
  double weight = 1;
};

struct Card {
  std::string title;
  std::string base_model;  // a name on the Hub, or of a folder
  std::string base_sha256;
  std::string base_weights;  // "original" or "dequantized"
  std::string format;        // of the output: "bf16"
  std::vector<CardAdapter> adapters;
  std::vector<std::string> notes;
};

// Names come from outside and are quoted.
std::string model_card(const Card& card, std::span<const MergeRow> rows);

}  // namespace monograph
