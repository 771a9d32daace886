// Regular expressions of rank_pattern and alpha_pattern, matched in linear time: the file they come
// from is not trusted, and backtracking matchers hang or overflow the stack on (a*)*b.
//
// The subset of Python's re that such patterns use: literals, ".", "^", "$", groups "( )" and
// "(?: )", "|", "*", "+", "?", "{m}", "{m,}", "{m,n}" (lazy forms too; a yes or no does not depend
// on them), classes "[a-z]" and "[^...]", and the escapes \d \D \w \W \s \S and \ before
// punctuation. Anything else is an error, never another meaning.
#pragma once

#include <bitset>
#include <cstdint>
#include <string_view>
#include <vector>

namespace monograph {

class ModulePattern {
 public:
  // `text` as in re.match(rf"(.*\.)?({text})$", name): the rule by which PEFT matches modules.
  // Throws Error, beginning with `source`, if the pattern is longer than 1000 characters, not
  // ASCII, not valid, or outside the subset.
  ModulePattern(std::string_view text, std::string_view source);

  bool matches(std::string_view module) const;
  // What a character of a module's name may cost at most.
  std::size_t size() const { return states_.size(); }

 private:
  friend class ModulePatternParser;
  using Class = std::bitset<256>;
  enum class Kind : std::uint8_t { kClass, kSplit, kBegin, kEnd, kAccept };
  struct State {
    Kind kind = Kind::kSplit;
    std::uint32_t next = 0, other = 0;  // other: of kSplit
    Class accepted = {};                // of kClass
  };
  void enter(std::uint32_t state, std::size_t position, std::size_t end,
             std::vector<std::uint32_t>& list, std::vector<std::size_t>& listed) const;

  std::vector<State> states_;
  std::uint32_t start_ = 0;
};

}  // namespace monograph
