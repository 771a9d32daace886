// Tokens as numbers: on the command line, in a file of prompts, and those that end an answer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace monograph::cli {

using Ids = std::vector<std::int64_t>;

struct Prompt {
  std::string source;  // begins a message about it
  Ids ids;
};

// Numbers with commas or blanks between them. Throws UsageError with `source` in front.
Ids read_ids(std::string_view text, const std::string& source);

// A prompt a line, each with one token or more. Throws UsageError of `option`.
std::vector<Prompt> read_prompts(const std::string& file, const std::string& option);
void check_not_empty(const Prompt& prompt);

// eos_token_id of generation_config.json, else of config.json; none if neither says.
Ids read_stops(const std::filesystem::path& folder);

}  // namespace monograph::cli
