#include "monograph/train/recipe_text.h"

#include <algorithm>
#include <charconv>

#include "monograph/base/error.h"

namespace monograph::train {
namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t' || text.back() == '\r'))
    text.remove_suffix(1);
  return text;
}

// A line without its comment: a # at the beginning, or behind a blank, outside of quotes.
std::string_view without_comment(std::string_view line) {
  char quote = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quote != 0) {
      if (c == quote) quote = 0;
    } else if ((c == '"' || c == '\'') &&
               (i == 0 || std::string_view(" \t[,:").find(line[i - 1]) != std::string_view::npos)) {
      quote = c;
    } else if (c == '#' && (i == 0 || line[i - 1] == ' ' || line[i - 1] == '\t')) {
      return line.substr(0, i);
    }
  }
  return line;
}

class Reader {
 public:
  Reader(std::string_view text, const std::string& source) : text_(text), source_(source) {}

  std::vector<RecipeEntry> read() {
    std::vector<RecipeEntry> entries;
    std::string_view line;
    while (next(line)) {
      const std::string_view whole = without_comment(line);
      const std::string_view part = trimmed(whole);
      if (part.empty()) continue;
      if (part == "---" && entries.empty()) continue;
      if (whole.starts_with("---") || whole.starts_with("..."))
        fail("ends the first document, wanted one");
      if (whole.front() == '\t') fail("begins with a tab, wanted blanks");
      const bool inside = whole.front() == ' ' || is_item(part);
      if (inside && entries.empty()) fail("belongs to no key");
      if (inside) {
        check_depth(whole.find_first_not_of(' '), is_item(part), entries.back());
        add_to(entries.back(), part);
      } else {
        entries.push_back(entry_of(whole, entries));
        within_.reset();
      }
    }
    return entries;
  }

 private:
  bool next(std::string_view& line) {
    if (text_.empty()) return false;
    ++number_;
    const std::size_t end = text_.find('\n');
    line = text_.substr(0, end);
    text_.remove_prefix(end == std::string_view::npos ? text_.size() : end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    return true;
  }

  static bool is_item(std::string_view part) { return part == "-" || part.starts_with("- "); }

  // Lines of one depth are all items or none, and none lies less deep: YAML reads anything else as
  // another tree, or not at all.
  void check_depth(std::size_t depth, bool item, const RecipeEntry& entry) {
    if (!within_) within_ = Within{depth, item};
    if (depth < within_->depth || (depth == within_->depth && item != within_->items) ||
        (depth > within_->depth && !entry.nested))
      fail("lies " + std::to_string(depth) + " blanks deep, wanted a line of " + entry.key +
           " at " + std::to_string(within_->depth) + (within_->items ? ", with a -" : ""));
  }

  RecipeEntry entry_of(std::string_view line, const std::vector<RecipeEntry>& before) const {
    const std::size_t colon = line.find(':');
    const bool key = colon != std::string_view::npos && colon > 0 &&
                     (colon + 1 == line.size() || line[colon + 1] == ' ');
    if (!key) fail("is '" + std::string(line) + "', wanted KEY: VALUE");
    RecipeEntry entry;
    entry.key = std::string(trimmed(line.substr(0, colon)));
    entry.line = number_;
    for (const RecipeEntry& other : before)
      if (other.key == entry.key)
        fail(entry.key + " was written in line " + std::to_string(other.line) + " already");
    const std::string_view value = trimmed(line.substr(colon + 1));
    entry.whole = !value.empty();
    if (value.empty()) return entry;
    if (value.front() == '{') {
      entry.nested = value != "{}";
      if (value.back() != '}') fail("has a mapping that goes on in another line");
      return entry;
    }
    if (value.front() == '[') {
      if (value.back() != ']') fail("has a list that goes on in another line");
      entry.nested = value.find('{') != std::string_view::npos;
      if (entry.nested) return entry;
      entry.list = true;
      const std::string_view inner = trimmed(value.substr(1, value.size() - 2));
      for (std::size_t begin = 0; begin < inner.size();) {
        const std::size_t end = std::min(inner.find(',', begin), inner.size());
        entry.items.push_back(scalar(trimmed(inner.substr(begin, end - begin))));
        begin = end + 1;
      }
      return entry;
    }
    entry.items.push_back(scalar(value));
    return entry;
  }

  // A line that is further in: an item of a list, or a part of something nested.
  void add_to(RecipeEntry& entry, std::string_view line) const {
    if (entry.whole) fail("is a second line of " + entry.key);
    if (entry.nested) return;
    const bool item = is_item(line);
    const std::string_view value = item ? trimmed(line.substr(1)) : line;
    const bool quoted = !value.empty() && (value.front() == '"' || value.front() == '\'');
    const bool mapping =
        !quoted && (value.find(": ") != std::string_view::npos || value.ends_with(':'));
    if (!item || mapping || value.empty()) {
      entry.nested = true;
      entry.items.clear();
      return;
    }
    entry.list = true;
    entry.items.push_back(scalar(value));
  }

  RecipeScalar scalar(std::string_view text) const {
    if (text.empty()) fail("has an empty item");
    const char first = text.front();
    if (first == '"' || first == '\'') {
      if (text.size() < 2 || text.back() != first || text.find('\\') != std::string_view::npos ||
          text.substr(1, text.size() - 2).find(first) != std::string_view::npos)
        fail("has " + std::string(text) + ", wanted quotes around it and none, and no \\, in it");
      return {std::string(text.substr(1, text.size() - 2)), true};
    }
    if (std::string_view("&*!|>%@`[]{}").find(first) != std::string_view::npos)
      fail("has '" + std::string(text) + "', which is no plain scalar");
    if (first == '~' && text.size() > 1)
      fail("has '" + std::string(text) + "': no shell reads it, wanted the folder written out");
    return {std::string(text), false};
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(source_ + ": line " + std::to_string(number_) + " " + what);
  }

  std::string_view text_;
  std::string source_;
  std::size_t number_ = 0;
  // Where the lines below a key begin.
  struct Within {
    std::size_t depth;
    bool items;
  };
  std::optional<Within> within_;
};

}  // namespace

bool RecipeScalar::is_null() const {
  return !quoted && (text == "null" || text == "Null" || text == "NULL" || text == "~");
}

std::optional<bool> RecipeScalar::as_bool() const {
  if (quoted) return std::nullopt;
  // As YAML 1.1 has them, which Python's reader follows.
  for (const char* word : {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})
    if (text == word) return true;
  for (const char* word : {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})
    if (text == word) return false;
  return std::nullopt;
}

std::optional<double> RecipeScalar::as_number() const {
  if (quoted || text.empty()) return std::nullopt;
  // 010 is 8 to YAML 1.1.
  const std::string_view digits_only(text.data() + (text[0] == '+' || text[0] == '-'));
  if (digits_only.size() > 1 && digits_only[0] == '0' &&
      digits_only.find_first_not_of("0123456789") == std::string_view::npos)
    return std::nullopt;
  const char* begin = text.data() + (text.front() == '+' ? 1 : 0);
  double number = 0;
  const auto [end, wrong] = std::from_chars(begin, text.data() + text.size(), number);
  // inf and nan are words there.
  const bool digits = std::string_view("0123456789.").find(*begin) != std::string_view::npos ||
                      (*begin == '-' && text.size() > 1 && text[1] != 'i' && text[1] != 'n');
  if (wrong != std::errc() || end != text.data() + text.size() || !digits) return std::nullopt;
  return number;
}

std::vector<RecipeEntry> parse_recipe(std::string_view text, const std::string& source) {
  return Reader(text, source).read();
}

}  // namespace monograph::train
