#include "token_ids.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>

#include "model.h"
#include "monograph/base/error.h"
#include "monograph/text/utf8.h"
#include "usage_error.h"

namespace monograph::cli {
namespace {

namespace fs = std::filesystem;

// eos_token_id: a number or a list of them.
Ids stops_in(const fs::path& file) {
  Ids ids;
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return ids;
  const json::Value config = read_json(file);
  const json::Value* const found = config.find("eos_token_id");
  if (found == nullptr || found->is(json::Kind::kNull)) return ids;
  const auto take = [&](const json::Value& value) {
    const std::optional<std::uint64_t> id = value.as_unsigned();
    if (!id || *id >= std::uint64_t{1} << 62)
      throw Error(file.string() + ": eos_token_id is " + json::dump_line(value) +
                  ", wanted a token or a list of them");
    ids.push_back(static_cast<std::int64_t>(*id));
  };
  if (!found->is(json::Kind::kArray)) {
    take(*found);
    return ids;
  }
  for (const json::Value& item : found->items()) take(item);
  return ids;
}

}  // namespace

// Numbers with blanks or one comma between them.
Ids read_ids(std::string_view text, const std::string& source) {
  constexpr std::string_view kBlanks = " \t\r", kBetween = ", \t\r";
  Ids ids;
  const auto skip = [&] {
    text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
  };
  for (skip(); !text.empty(); skip()) {
    if (!ids.empty() && text.front() == ',') {
      text.remove_prefix(1);
      skip();
    }
    const std::string_view word = text.substr(0, text.find_first_of(kBetween));
    std::int64_t id = -1;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc() || end != word.data() + word.size() || id < 0)
      throw UsageError(
          source, text::in_quotes(word) + " is no token, wanted whole numbers, 0 or more: 1,2,3");
    ids.push_back(id);
    text.remove_prefix(word.size());
  }
  return ids;
}

void check_not_empty(const Prompt& prompt) {
  if (prompt.ids.empty())
    throw UsageError(prompt.source, "the prompt is empty, wanted one token or more");
}

std::vector<Prompt> read_prompts(const std::string& file, const std::string& option) {
  std::error_code ignored;
  if (fs::is_directory(file, ignored))
    throw UsageError(option, "'" + file + "' is a folder, wanted a file of prompts");
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw UsageError(option, "'" + file + "' cannot be read");
  std::vector<Prompt> prompts;
  std::string line;
  while (std::getline(stream, line)) {
    const std::string source = option + ": line " + std::to_string(prompts.size() + 1);
    prompts.push_back({source, read_ids(line, source)});
    check_not_empty(prompts.back());
  }
  if (prompts.empty())
    throw UsageError(option, "'" + file + "' is empty, wanted a line of tokens for each prompt");
  return prompts;
}

Ids read_stops(const fs::path& folder) {
  const Ids found = stops_in(folder / "generation_config.json");
  return found.empty() ? stops_in(folder / "config.json") : found;
}

}  // namespace monograph::cli
