// Weights of four and eight bits in words of 32 bits that no kernel reads as they lie. convert
// turns them once, without loss, into the rows of compressed-tensors (convert/turn_words.h).
//   GPTQ, AutoRound  X.qweight [inputs * bits / 32, outputs], the first input in the lowest bits;
//                    X.qzeros [groups, outputs * bits / 32], the first output in the lowest bits;
//                    X.scales [groups, outputs]; X.g_idx [inputs], the group of each input: in
//                    any order (desc_act), as many inputs in each
//   AWQ (gemm)       X.qweight [inputs, outputs / 8], nibble i of a word is output kAwqOrder[i] of
//                    eight; X.qzeros [groups, outputs / 8] alike; X.scales [groups, outputs]
//   The element is (code - zero) * scale. GPTQ's first version stores zero - 1.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "monograph/quant_methods/candidate.h"

namespace monograph {

inline constexpr std::array<std::size_t, 8> kAwqOrder = {0, 2, 4, 6, 1, 3, 5, 7};

// What the zero points' fields hold.
enum class ZeroFields : std::uint8_t {
  kAsTheyAre,
  kLessOne,         // zero - 1; a field of all ones has two readings and is refused
  kLessOneByWords,  // the same, subtracted from whole words with borrows: GPTQModel
};

struct WordLayout {
  bool along_outputs = false;  // AWQ
  unsigned bits = 4;
  std::uint64_t outputs = 0, inputs = 0, group = 0;
  ZeroFields zeros = ZeroFields::kAsTheyAre;
  // Inputs ordered by their group, where g_idx scatters groups (act-order); empty where inputs lie
  // in the order of groups.
  std::vector<std::uint32_t> columns = {};

  std::uint64_t groups() const { return inputs / group; }
  std::uint64_t per_word() const { return 32 / bits; }
};

// The form of a weight of these producers. Empty, with the reason in `why`, if it is one that
// cannot be turned. Throws Error if the parts contradict each other.
std::optional<WordLayout> word_layout(const Candidate& found, std::string& why);

// The same of a weight that list_weights gave. Throws Error with the reason.
WordLayout words_of(const Weight& weight, const json::Value& config);

// What quantization_config says: words along the outputs (AWQ), or along the inputs.
bool says_awq(const json::Value* config);

// Whether it says that every zero point is the middle code.
bool says_symmetric(const json::Value* config);

// Fills in format and shape: "gptq" or "awq" for what can be turned, else "words".
void describe_words(const Candidate& found);

}  // namespace monograph
