#include "monograph/train/recipe_text.h"

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"
#include "monograph/train/recipe_scalar.h"

namespace monograph::train {
namespace {

using Kind = RecipeValue::Kind;
constexpr int kMostDepth = 32;

struct Line {
  std::size_t depth;      // blanks in front of it
  std::string_view text;  // behind them, the blanks at the end left out
  std::size_t number;
};

bool is_item(std::string_view text) { return text == "-" || text.starts_with("- "); }

std::string_view without_blanks(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
}

// Blocks of lines: one is as deep as its first line, and ends with a line that is less deep.
class Reader {
 public:
  Reader(std::string_view text, const std::string& source) : source_(source) {
    if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
    for (number_ = 1; !text.empty(); ++number_) {
      const std::size_t end = text.find('\n');
      std::string_view line = text.substr(0, end);
      text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
      if (line.ends_with('\r')) line.remove_suffix(1);
      check_characters(line);
      add(line);
    }
  }

  std::vector<RecipeEntry> read() {
    if (lines_.empty()) return {};
    if (lines_[0].depth > 0 || is_item(lines_[0].text)) fail("belongs to no key");
    if (colon() == std::string_view::npos) fail_place(0);
    return std::move(mapping(0).members);
  }

 private:
  // Line feeds alone divide lines, as for YAML; what it calls unprintable stands nowhere.
  void check_characters(std::string_view line) {
    if (!text::is_utf8(line)) fail_at(number_, "is not UTF-8");
    for (std::size_t i = 0; i < line.size(); ++i) {
      const auto c = static_cast<unsigned char>(line[i]);
      const bool c1 = c == 0xC2 && text::byte_at(line, i + 1) < 0xA0;
      const std::string_view three = line.substr(i, 3);
      if ((c < 0x20 && c != '\t') || c == 0x7F || c1 || three == "\xE2\x80\xA8" ||
          three == "\xE2\x80\xA9" || three == "\xEF\xBF\xBE" || three == "\xEF\xBF\xBF")
        fail_at(number_, "has a control character");
    }
  }

  void add(std::string_view line) {
    const std::size_t depth = line.find_first_not_of(' ');
    const std::string_view text = without_blanks(line);
    if (text.empty() || text[0] == '#') return;
    if (text[0] == '\t') fail_at(number_, "begins with a tab, wanted blanks");
    if (depth == 0 && text == "---" && lines_.empty() && !begun_) {
      begun_ = true;
      return;
    }
    if (depth == 0 && (text.starts_with("---") || text.starts_with("...") || text[0] == '%'))
      fail_at(number_, "begins or ends a document, wanted one document");
    lines_.push_back({depth, text, number_});
  }

  bool at_end() const { return at_ == lines_.size(); }
  Line& line() { return lines_[at_]; }
  bool deeper_than(std::size_t depth) { return !at_end() && line().depth > depth; }

  RecipeValue block(int levels) {
    if (levels > kMostDepth) fail("lies too deep");
    if (is_item(line().text)) return list(levels);
    if (colon() != std::string_view::npos) return mapping(levels);
    RecipeValue value = scalar(line().text);
    const std::size_t depth = line().depth;
    ++at_;
    if (!at_end() && line().depth >= depth && depth > 0) fail("goes on with the value above it");
    return value;
  }

  std::size_t colon() {
    return located([&] { return colon_of_key(line().text); });
  }

  RecipeValue mapping(int levels) {
    RecipeValue value;
    value.kind = Kind::kMapping;
    const std::size_t depth = line().depth;
    for (; !at_end() && line().depth >= depth;) {
      const std::size_t at = is_item(line().text) ? std::string_view::npos : colon();
      if (line().depth > depth || at == std::string_view::npos) fail_place(depth);
      RecipeEntry entry;
      entry.line = line().number;
      entry.key = located([&] { return key_in(line().text.substr(0, at)); });
      for (const RecipeEntry& other : value.members)
        if (other.key == entry.key)
          fail(entry.key + " was written in line " + std::to_string(other.line) + " already");
      const std::string_view rest = without_blanks(line().text.substr(at + 1));
      if (!rest.empty() && rest[0] != '#') {
        entry.value = scalar(rest);
        ++at_;
        if (deeper_than(depth)) fail("is a second line of " + entry.key);
      } else {
        ++at_;
        const bool items = !at_end() && line().depth == depth && is_item(line().text);
        if (deeper_than(depth) || items) entry.value = block(levels + 1);
      }
      value.members.push_back(std::move(entry));
    }
    return value;
  }

  RecipeValue list(int levels) {
    RecipeValue value;
    value.kind = Kind::kList;
    const std::size_t depth = line().depth;
    while (!at_end() && line().depth >= depth) {
      if (line().depth > depth) fail_place(depth);
      if (!is_item(line().text)) break;  // the next key of the mapping that the list belongs to
      const std::string_view rest = without_blanks(line().text.substr(1));
      if (rest.empty() || rest[0] == '#') {
        ++at_;
        value.items.push_back(deeper_than(depth) ? block(levels + 1) : RecipeValue());
        continue;
      }
      // What stands behind the dash begins a block there.
      line().depth += static_cast<std::size_t>(rest.data() - line().text.data());
      line().text = rest;
      value.items.push_back(block(levels + 1));
    }
    return value;
  }

  RecipeValue scalar(std::string_view text) {
    return located([&] { return inline_value(text); });
  }

  template <class Body>
  auto located(const Body& body) -> decltype(body()) {
    try {
      return body();
    } catch (const Error& error) {
      fail(error.what());
    }
  }

  [[noreturn]] void fail_place(std::size_t depth) {
    if (line().depth == depth) fail("is '" + std::string(line().text) + "', wanted KEY: VALUE");
    fail("lies " + std::to_string(line().depth) + " blanks deep, wanted " + std::to_string(depth) +
         ", or less");
  }
  [[noreturn]] void fail(const std::string& what) {
    fail_at(at_end() ? number_ : line().number, what);
  }
  [[noreturn]] void fail_at(std::size_t number, const std::string& what) const {
    throw Error(source_ + ": line " + std::to_string(number) + " " + what);
  }

  const std::string& source_;
  std::vector<Line> lines_;
  std::size_t number_ = 0, at_ = 0;
  bool begun_ = false;
};

}  // namespace

std::vector<RecipeEntry> parse_recipe(std::string_view text, const std::string& source) {
  return Reader(text, source).read();
}

}  // namespace monograph::train
