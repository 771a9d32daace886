#include "monograph/adapter/module_pattern.h"

#include <memory>
#include <string>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

constexpr std::size_t kMaxPatternChars = 1000;
constexpr int kMaxDepth = 50;
constexpr std::size_t kMaxRepeats = 1000;
constexpr std::size_t kMaxStates = 2000;
// Bounds the work of repeats of nothing, which make no states.
constexpr std::size_t kMaxSteps = 100'000;
constexpr std::uint32_t kOpenEnd = UINT32_MAX;

using Class = std::bitset<256>;

Class class_of(char letter) {
  Class members;
  for (int c = 0; c < 128; ++c) {
    const bool digit = c >= '0' && c <= '9';
    const bool word = digit || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
    const bool space = c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f);
    const char kind = static_cast<char>(letter | 0x20);
    if (kind == 'd' ? digit : kind == 'w' ? word : space) members.set(static_cast<std::size_t>(c));
  }
  return letter < 'a' ? ~members : members;
}

bool is_class_letter(char c) {
  return std::string_view("dDwWsS").find(c) != std::string_view::npos;
}

bool is_punctuation(char c) {
  return c > 0x20 && c < 0x7f &&
         !((c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z'));
}

}  // namespace

// Recursive descent to a syntax tree, then the tree to states from the back.
class ModulePatternParser {
 public:
  ModulePatternParser(std::string_view text, std::string_view source)
      : text_(text), source_(source) {}

  // The whole pattern: (.*\.)?(text)$
  void build(ModulePattern& pattern) {
    std::unique_ptr<Node> body = alternation(0);
    if (position_ != text_.size()) fail("has an unmatched ')'");
    pattern_ = &pattern;
    const std::uint32_t accept = add({.kind = ModulePattern::Kind::kAccept});
    const std::uint32_t end = add({.kind = ModulePattern::Kind::kEnd, .next = accept});
    const std::uint32_t inner = emit(*body, end);
    Class dot, any;
    dot.set('.');
    any.set();
    any.reset('\n');
    const std::uint32_t last =
        add({.kind = ModulePattern::Kind::kClass, .next = inner, .accepted = dot});
    const std::uint32_t loop = add({.kind = ModulePattern::Kind::kSplit, .next = last});
    const std::uint32_t one =
        add({.kind = ModulePattern::Kind::kClass, .next = loop, .accepted = any});
    pattern.states_[loop].other = one;
    pattern.start_ = add({.kind = ModulePattern::Kind::kSplit, .next = loop, .other = inner});
  }

 private:
  struct Node {
    enum class Kind : std::uint8_t { kEmpty, kClass, kBegin, kEnd, kSequence, kChoice, kRepeat };
    Kind kind = Kind::kEmpty;
    Class accepted = {};
    std::size_t least = 0, most = 0;  // of kRepeat; most == SIZE_MAX: no limit
    std::vector<std::unique_ptr<Node>> children = {};
  };
  using NodePtr = std::unique_ptr<Node>;

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(std::string(source_) + ": pattern " + text::in_quotes(text_) + " " + what);
  }
  bool at_end() const { return position_ == text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[position_]; }
  bool accept(char c) {
    if (at_end() || text_[position_] != c) return false;
    ++position_;
    return true;
  }

  static NodePtr leaf(Node::Kind kind, Class accepted = {}) {
    NodePtr node = std::make_unique<Node>();
    node->kind = kind;
    node->accepted = accepted;
    return node;
  }

  NodePtr alternation(int depth) {
    if (depth > kMaxDepth) fail("has more than 50 groups inside one another");
    NodePtr choice = leaf(Node::Kind::kChoice);
    do {
      choice->children.push_back(sequence(depth));
    } while (accept('|'));
    return choice;
  }

  NodePtr sequence(int depth) {
    NodePtr nodes = leaf(Node::Kind::kSequence);
    while (!at_end() && peek() != '|' && peek() != ')') {
      NodePtr node = atom(depth);
      nodes->children.push_back(repeated(std::move(node)));
    }
    return nodes;
  }

  NodePtr repeated(NodePtr node) {
    std::size_t least = 0, most = 0;
    if (!repeat_counts(least, most)) return node;
    if (node->kind == Node::Kind::kBegin || node->kind == Node::Kind::kEnd) {
      fail("repeats an anchor, which is not supported");
    }
    accept('?');  // lazy
    std::size_t again_least = 0, again_most = 0;
    if (peek() == '+' || repeat_counts(again_least, again_most)) fail("repeats a repeat");
    NodePtr repeat = leaf(Node::Kind::kRepeat);
    repeat->least = least;
    repeat->most = most;
    repeat->children.push_back(std::move(node));
    return repeat;
  }

  bool repeat_counts(std::size_t& least, std::size_t& most) {
    most = SIZE_MAX;
    if (accept('*')) return true;
    if (accept('+')) {
      least = 1;
      return true;
    }
    if (accept('?')) {
      most = 1;
      return true;
    }
    if (peek() != '{') return false;
    ++position_;
    // Python reads a brace that begins no count as a literal; nobody means that in a module name.
    if (!is_digit(peek())) fail("has '{' without a count");
    least = most = count();
    if (accept(',')) most = is_digit(peek()) ? count() : SIZE_MAX;
    if (!accept('}')) fail("has '{' without a count");
    if (most < least) fail("has a count whose end is below its begin");
    return true;
  }

  static bool is_digit(char c) { return c >= '0' && c <= '9'; }
  std::size_t count() {
    std::size_t value = 0;
    while (is_digit(peek())) {
      value = value * 10 + static_cast<std::size_t>(text_[position_++] - '0');
      if (value > kMaxRepeats) fail("repeats more than 1000 times");
    }
    return value;
  }

  NodePtr atom(int depth) {
    const char c = text_[position_++];
    switch (c) {
      case '(': {
        if (accept('?') && !accept(':')) fail("uses '(?', of which only '(?:' is supported");
        NodePtr group = alternation(depth + 1);
        if (!accept(')')) fail("has an unmatched '('");
        return group;
      }
      case '[':
        return leaf(Node::Kind::kClass, bracket());
      case '.': {
        Class any;
        any.set();
        any.reset('\n');
        return leaf(Node::Kind::kClass, any);
      }
      case '^':
        return leaf(Node::Kind::kBegin);
      case '$':
        return leaf(Node::Kind::kEnd);
      case '*':
      case '+':
      case '?':
      case '{':
        fail("repeats nothing");
      default:
        break;
    }
    Class one;
    if (c == '\\') {
      one = escape();
    } else {
      one.set(static_cast<unsigned char>(c));
    }
    return leaf(Node::Kind::kClass, one);
  }

  Class escape() {
    if (at_end()) fail("ends with a backslash");
    const char c = text_[position_++];
    if (is_class_letter(c)) return class_of(c);
    if (!is_punctuation(c)) fail("uses '\\" + std::string(1, c) + "', which is not supported");
    Class one;
    one.set(static_cast<unsigned char>(c));
    return one;
  }

  Class bracket() {
    const bool negated = accept('^');
    Class members;
    bool first = true;
    while (first || peek() != ']') {
      if (at_end()) fail("has an unmatched '['");
      first = false;
      const char c = text_[position_++];
      const bool escaped = c == '\\';
      const Class one = escaped ? escape() : Class().set(static_cast<unsigned char>(c));
      const bool range =
          peek() == '-' && position_ + 1 < text_.size() && text_[position_ + 1] != ']';
      if (!range) {
        members |= one;
        continue;
      }
      ++position_;
      const char last = text_[position_++];
      if (escaped || last == '\\') fail("has a range with an escape, which is not supported");
      const std::size_t first_byte = static_cast<unsigned char>(c);
      const std::size_t last_byte = static_cast<unsigned char>(last);
      if (last_byte < first_byte) fail("has a range whose end is below its begin");
      for (std::size_t i = first_byte; i <= last_byte; ++i) members.set(i);
    }
    ++position_;
    return negated ? ~members : members;
  }

  std::uint32_t add(ModulePattern::State state) {
    if (pattern_->states_.size() == kMaxStates) fail("is too large");
    pattern_->states_.push_back(state);
    return static_cast<std::uint32_t>(pattern_->states_.size() - 1);
  }

  // The first state of `node`, after which comes `next`.
  std::uint32_t emit(const Node& node, std::uint32_t next) {
    if (++steps_ > kMaxSteps) fail("is too large");
    switch (node.kind) {
      case Node::Kind::kEmpty:
        return next;
      case Node::Kind::kClass:
        return add({.kind = ModulePattern::Kind::kClass, .next = next, .accepted = node.accepted});
      case Node::Kind::kBegin:
        return add({.kind = ModulePattern::Kind::kBegin, .next = next});
      case Node::Kind::kEnd:
        return add({.kind = ModulePattern::Kind::kEnd, .next = next});
      case Node::Kind::kSequence:
        for (auto child = node.children.rbegin(); child != node.children.rend(); ++child) {
          next = emit(**child, next);
        }
        return next;
      case Node::Kind::kChoice: {
        std::uint32_t first = emit(*node.children.back(), next);
        for (std::size_t i = node.children.size() - 1; i-- > 0;) {
          const std::uint32_t other = emit(*node.children[i], next);
          first = add({.kind = ModulePattern::Kind::kSplit, .next = first, .other = other});
        }
        return first;
      }
      case Node::Kind::kRepeat:
        return emit_repeat(node, next);
    }
    return next;
  }

  std::uint32_t emit_repeat(const Node& node, std::uint32_t next) {
    const Node& child = *node.children.front();
    std::uint32_t first = next;
    if (node.most == SIZE_MAX) {
      first = add({.kind = ModulePattern::Kind::kSplit, .next = next, .other = kOpenEnd});
      const std::uint32_t body = emit(child, first);
      pattern_->states_[first].other = body;
    } else {
      for (std::size_t i = node.least; i < node.most; ++i) {
        const std::uint32_t body = emit(child, first);
        first = add({.kind = ModulePattern::Kind::kSplit, .next = next, .other = body});
      }
    }
    for (std::size_t i = 0; i < node.least; ++i) first = emit(child, first);
    return first;
  }

  std::string_view text_, source_;
  std::size_t position_ = 0, steps_ = 0;
  ModulePattern* pattern_ = nullptr;
};

ModulePattern::ModulePattern(std::string_view text, std::string_view source) {
  const auto refuse = [&](const char* what) {
    throw Error(std::string(source) + ": pattern " + text::in_quotes(text) + what);
  };
  if (text.size() > kMaxPatternChars) refuse(" is longer than 1000 characters");
  for (const char c : text) {
    if (const auto byte = static_cast<unsigned char>(c); byte < 0x20 || byte >= 0x7f)
      refuse(" holds a character that is not printable ASCII");
  }
  ModulePatternParser(text, source).build(*this);
}

// Adds the states reached from `state` without a character. Iterative: patterns nest, and a chain
// of optional parts is as long as the pattern.
void ModulePattern::enter(std::uint32_t state, std::size_t position, std::size_t end,
                          std::vector<std::uint32_t>& list,
                          std::vector<std::size_t>& listed) const {
  std::vector<std::uint32_t> open = {state};
  while (!open.empty()) {
    const std::uint32_t at = open.back();
    open.pop_back();
    if (std::exchange(listed[at], position + 1) == position + 1) continue;
    const State& here = states_[at];
    switch (here.kind) {
      case Kind::kSplit:
        open.push_back(here.other);
        open.push_back(here.next);
        break;
      case Kind::kBegin:
        if (position == 0) open.push_back(here.next);
        break;
      case Kind::kEnd:
        if (position == end) open.push_back(here.next);
        break;
      case Kind::kClass:
      case Kind::kAccept:
        list.push_back(at);
        break;
    }
  }
}

bool ModulePattern::matches(std::string_view module) const {
  std::vector<std::uint32_t> now, later;
  std::vector<std::size_t> listed(states_.size(), 0);  // behind how many characters, and one
  enter(start_, 0, module.size(), now, listed);
  for (std::size_t i = 0; i < module.size(); ++i) {
    later.clear();
    for (const std::uint32_t at : now) {
      const State& here = states_[at];
      if (here.kind == Kind::kClass && here.accepted.test(static_cast<unsigned char>(module[i]))) {
        enter(here.next, i + 1, module.size(), later, listed);
      }
    }
    now.swap(later);
  }
  for (const std::uint32_t at : now) {
    if (states_[at].kind == Kind::kAccept) return true;
  }
  return false;
}

}  // namespace monograph
