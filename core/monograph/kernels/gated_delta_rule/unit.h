// What a kernel works on and what it offers: one document and one key head with its value heads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/cpu/tags.h"
#include "monograph/kernels/gated_delta_rule/gated_delta_rule.h"

namespace monograph {

// Tokens that share one triangular solve; a document's last chunk may be shorter.
inline constexpr std::int64_t kChunk = 64;

// Documents of at most so many tokens are computed token by token: the state is read and written
// once, where a chunk would be mostly padding.
inline constexpr std::int64_t kFewTokens = 4;

// The backward keeps the states at the starts of as many chunks as fit here; a longer document is
// cut into segments, whose states are scanned from the state at the segment's start.
inline constexpr std::size_t kKeptStates = std::size_t{6} << 20;

// e^-128 is 0 in fp32, and a decay below that would cost the sums of G their last bits.
inline constexpr float kLeastDecay = -128.f;

template <class Job>
struct DeltaRuleUnit {
  const Job& job;
  std::int64_t begin, tokens;  // of the document
  std::size_t document, key_head;

  [[gnu::always_inline]] std::size_t group() const {
    return job.problem.value_heads / job.problem.key_heads;
  }
  // Where the state of value head `head` stands in an array of states.
  [[gnu::always_inline]] std::size_t state_at(std::size_t head) const {
    const DeltaRuleProblem& p = job.problem;
    return (document * p.value_heads + head) * p.key_size * p.value_size;
  }
};
using DeltaForwardUnit = DeltaRuleUnit<DeltaRuleForward>;
using DeltaBackwardUnit = DeltaRuleUnit<DeltaRuleBackward>;

// Scratch is aligned to 64 bytes and one thread's.
struct DeltaRuleKernels {
  std::size_t (*forward_bytes)(const DeltaRuleProblem&);
  void (*forward)(const DeltaForwardUnit&, std::byte* scratch);
  // One value head of a document of at most kFewTokens tokens. nullptr in a matrix unit, which
  // gains nothing: the next vector unit runs them.
  void (*few)(const DeltaForwardUnit&, std::size_t head);
  std::size_t (*backward_bytes)(const DeltaRuleProblem&, std::int64_t tokens);
  void (*backward)(const DeltaBackwardUnit&, std::byte* scratch);
};

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp, amx.cpp; nullptr for
// a type it has nothing for.
template <class V>
const DeltaRuleKernels* delta_rule_kernels(DType dtype);

}  // namespace monograph
