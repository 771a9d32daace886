// The forward in fp32 on any vector vocabulary V, for storage type T: blocks of 48 queries by 64
// keys, S = Q K' with keys as lanes, softmax row by row, O += P V.
#pragma once

#include "monograph/cpu/bump_allocator.h"
#include "monograph/kernels/varlen_attention/vector/product.h"
#include "monograph/kernels/varlen_attention/vector/rows.h"
#include "monograph/kernels/varlen_attention/vector/softmax_row.h"

namespace monograph {

template <class V, class T>
struct VectorForward {
  using L = Lanes<V>;
  static constexpr std::int64_t kQueries = 48, kKeys = 64;

  struct Packed {
    float *k, *v;     // blocks of kKeys: k[key_size, kKeys], v[kKeys, value_width]
    bool* nonfinite;  // per block: its v holds NaN or an infinity
  };
  struct Scratch {
    float *q, *scores, *out, *peak, *sum;
  };

  static Packed packed(const AttentionProblem& p, const Document& d, BumpAllocator& allocator) {
    const std::int64_t keys = (d.keys + kKeys - 1) / kKeys * kKeys;
    Packed result;
    result.k = allocator.take<float>(keys * padded(p.key_size));
    result.v = allocator.take<float>(keys * padded(p.value_size));
    result.nonfinite = allocator.take<bool>(keys / kKeys);
    return result;
  }
  static std::size_t packed_bytes(const AttentionProblem& p, const Document& d) {
    BumpAllocator allocator{nullptr};
    packed(p, d, allocator);
    return allocator.bytes();
  }

  static Scratch scratch(const AttentionProblem& p, BumpAllocator& allocator) {
    Scratch result;
    result.q = allocator.take<float>(kQueries * padded(p.key_size));
    result.scores = allocator.take<float>(kQueries * kKeys);
    result.out = allocator.take<float>(kQueries * padded(p.value_size));
    result.peak = allocator.take<float>(kQueries);
    result.sum = allocator.take<float>(kQueries);
    return result;
  }
  static std::size_t scratch_bytes(const AttentionProblem& p) {
    BumpAllocator allocator{nullptr};
    scratch(p, allocator);
    return allocator.bytes();
  }

  static void pack(const ForwardUnit& unit, std::int64_t block) {
    const AttentionProblem& p = unit.job.problem;
    const Document& d = unit.document;
    BumpAllocator allocator{unit.packed};
    const Packed to = packed(p, d, allocator);
    const std::int64_t j = block * kKeys, rows = d.keys - j < kKeys ? d.keys - j : kKeys;
    const std::int64_t key_width = padded(p.key_size), value_width = padded(p.value_size);
    const std::int64_t value_size = static_cast<std::int64_t>(p.value_size);
    float row[kLargestAttentionHead];
    widen_transposed<V, T>(unit.job.k, d.key_begin + j, rows, unit.kv_head,
                           static_cast<std::int64_t>(p.key_size), kKeys, row, to.k + j * key_width);
    float* const v = to.v + j * value_width;
    for (std::int64_t r = 0; r < rows; ++r)
      widen_row<V>(row_of<T>(unit.job.v, d.key_begin + j + r, unit.kv_head), value_size,
                   value_width, v + r * value_width);
    clear_floats<V>(v + rows * value_width, (kKeys - rows) * value_width);
    to.nonfinite[block] = any_nonfinite<V>(v, rows * value_width);
  }

  static void attend_block(const AttentionProblem& p, const Visibility& sees, const Packed& from,
                           const Scratch& s, std::int64_t i, std::int64_t rows, std::int64_t j) {
    const std::int64_t key_width = padded(p.key_size), value_width = padded(p.value_size);
    std::int64_t first[kQueries], last[kQueries];
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t begin = sees.begin(i + r) - j, end = sees.end(i + r) - j;
      first[r] = begin < 0 ? 0 : begin > kKeys ? kKeys : begin;
      last[r] = end < first[r] ? first[r] : end > kKeys ? kKeys : end;
    }
    const bool whole = sees.covers(i, i + rows, j, j + kKeys);
    const Within seen = whole ? Within{} : Within{first, last};
    product_of<V>({s.q, key_width, 1}, from.k + j * key_width, kKeys, s.scores, kKeys, rows, kKeys,
                  static_cast<std::int64_t>(p.key_size), seen);
    for (std::int64_t r = 0; r < rows; ++r)
      softmax_row<V>(p, s.scores + r * kKeys, kKeys, first[r], last[r], s.peak[r], s.sum[r],
                     s.out + r * value_width, value_width);
    const auto add = from.nonfinite[j / kKeys] && !whole ? product_within<V> : add_product<V>;
    add({s.scores, kKeys, 1}, from.v + j * value_width, value_width, s.out, value_width, rows,
        value_width, kKeys, seen);
  }

  static void attend(const ForwardUnit& unit, std::int64_t block, std::byte* memory) {
    const AttentionProblem& p = unit.job.problem;
    const Document& d = unit.document;
    const Visibility sees = visibility(p, d);
    BumpAllocator shared{unit.packed}, own{memory};
    const Packed from = packed(p, d, shared);
    const Scratch s = scratch(p, own);
    const std::int64_t i = block * kQueries;
    const std::int64_t rows = d.queries - i < kQueries ? d.queries - i : kQueries;
    const std::int64_t key_width = padded(p.key_size), value_width = padded(p.value_size);
    for (std::size_t g = 0; g < unit.group(); ++g) {
      const std::size_t head = unit.kv_head * unit.group() + g;
      for (std::int64_t r = 0; r < rows; ++r) {
        widen_row<V>(row_of<T>(unit.job.q, d.query_begin + i + r, head),
                     static_cast<std::int64_t>(p.key_size), key_width, s.q + r * key_width);
        s.peak[r] = kNoScore;
        s.sum[r] = 0;
      }
      clear_floats<V>(s.out, rows * value_width);
      for (std::int64_t j = sees.begin(i) / kKeys * kKeys; j < sees.end(i + rows - 1); j += kKeys)
        attend_block(p, sees, from, s, i, rows, j);
      float* const lse =
          unit.job.lse + head * p.query_tokens + static_cast<std::size_t>(d.query_begin + i);
      for (std::int64_t r = 0; r < rows; ++r) {
        const float inverse = close_row(s.peak[r], s.sum[r], p.sinks, head, lse + r);
        // A row that saw nothing is 0 even where the document holds NaN.
        if (inverse == 0) clear_floats<V>(s.out + r * value_width, value_width);
        narrow_row<V>(s.out + r * value_width, inverse, static_cast<std::int64_t>(p.value_size),
                      row_of<T>(unit.job.out, d.query_begin + i + r, head));
      }
    }
  }

  static constexpr ForwardKernel kKernel = {kQueries,      kKeys, packed_bytes,
                                            scratch_bytes, pack,  attend};
};

}  // namespace monograph
