// What a kernel works on and what it offers: one document and one key-value head at a time, cut
// into phases that the driver runs on one thread or on several.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/cpu/tags.h"
#include "monograph/kernels/varlen_attention/varlen_attention.h"

namespace monograph {

struct Document {
  std::int64_t query_begin, queries, key_begin, keys;
};

// Which keys a query sees. Both ends ascend with i, so a range of queries sees a range of keys.
struct Visibility {
  std::int64_t shift, keys, before, after;

  [[gnu::always_inline]] std::int64_t begin(std::int64_t i) const {
    const std::int64_t first = i + shift - before;
    return first < 0 ? 0 : first;
  }
  [[gnu::always_inline]] std::int64_t end(std::int64_t i) const {
    const std::int64_t last = i + shift + after + 1;
    return last > keys ? keys : last;
  }
  // The first query that sees a key, if there are keys; all later ones see one too.
  [[gnu::always_inline]] std::int64_t first_with_keys() const {
    const std::int64_t first = -shift - after;
    return first < 0 ? 0 : first;
  }
  // Some pair of queries [i, i_end) and keys [j, j_end) may be visible. For fixed queries the
  // blocks of keys that meet this are contiguous, and the other way round.
  [[gnu::always_inline]] bool touches(std::int64_t i, std::int64_t i_end, std::int64_t j,
                                      std::int64_t j_end) const {
    return begin(i) < j_end && end(i_end - 1) > j;
  }
  [[gnu::always_inline]] bool covers(std::int64_t i, std::int64_t i_end, std::int64_t j,
                                     std::int64_t j_end) const {
    return begin(i_end - 1) <= j && end(i) >= j_end;
  }
};

[[gnu::always_inline]] inline Visibility visibility(const AttentionProblem& p, const Document& d) {
  // Farther than any key, and far from overflow when added to a position.
  constexpr std::int64_t kFar = std::int64_t{1} << 40;
  const std::int64_t reach = p.window > 0 && p.window <= kFar ? p.window - 1 : kFar;
  return {d.keys - d.queries, d.keys, reach, p.causal ? 0 : reach};
}

template <class Job>
struct AttentionUnit {
  const Job& job;
  Document document;
  std::size_t kv_head;
  std::byte* packed;  // 64-byte aligned, packed_bytes(); shared by the threads of a unit

  [[gnu::always_inline]] std::size_t group() const {
    return job.problem.heads / job.problem.kv_heads;
  }
};
using ForwardUnit = AttentionUnit<AttentionForward>;
using BackwardUnit = AttentionUnit<AttentionBackward>;

// Phases of the forward, one after another. Blocks of a phase are independent of each other.
struct ForwardKernel {
  std::int64_t query_block, key_block;
  std::size_t (*packed_bytes)(const AttentionProblem&, const Document&);
  std::size_t (*scratch_bytes)(const AttentionProblem&);  // per thread, 64-byte aligned
  void (*pack)(const ForwardUnit&, std::int64_t block);   // a block of keys
  void (*attend)(const ForwardUnit&, std::int64_t block, std::byte* scratch);  // a block of queries
};

// Phases of the backward. `slots` query heads are packed at once: one when a thread runs the whole
// unit (differentiate), the whole group when key_gradients and then query_gradients run on several
// threads. Both form every sum in the same order, hence the same bits; the second computes the
// scores twice.
struct BackwardKernel {
  std::int64_t query_block, key_block;
  std::size_t (*packed_bytes)(const AttentionProblem&, const Document&, std::size_t slots);
  std::size_t (*scratch_bytes)(const AttentionProblem&);
  // Of differentiate() beyond scratch_bytes(): sums over the whole document.
  std::size_t (*sums_bytes)(const AttentionProblem&, const Document&);
  void (*pack_keys)(const BackwardUnit&, std::int64_t block);
  void (*pack_queries)(const BackwardUnit&, std::size_t head, std::size_t slot, std::int64_t block);
  // The document's part of dsinks[head]; needs the packed queries of the slot.
  float (*sink_gradient)(const BackwardUnit&, std::size_t head, std::size_t slot);
  void (*differentiate)(const BackwardUnit&, std::byte* scratch, std::byte* sums, float* dsinks);
  void (*key_gradients)(const BackwardUnit&, std::int64_t block, std::byte* scratch);
  void (*query_gradients)(const BackwardUnit&, std::size_t head, std::int64_t block,
                          std::byte* scratch);
};

struct AttentionKernels {
  const ForwardKernel* forward;
  // For documents of at most kFewQueries queries against many keys: reads each key once and packs
  // nothing. nullptr in a matrix unit, which gains nothing on them: the next vector unit runs them.
  const ForwardKernel* few;
  const BackwardKernel* backward;
};

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp, amx.cpp; nullptr for
// a type it has nothing for.
template <class V>
const AttentionKernels* attention_kernels(DType dtype);

}  // namespace monograph
