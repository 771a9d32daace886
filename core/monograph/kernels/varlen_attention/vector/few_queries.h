// The forward for a few queries against many keys (decoding): bound by reading K and V once, so
// only a block of keys is packed at a time, and it serves every query and every head of the group
// while it is in the cache. Blocks, chains and sums are those of forward.h: a query has the same
// bits alone against a cache and inside its sequence.
#pragma once

#include "monograph/cpu/bump_allocator.h"
#include "monograph/kernels/varlen_attention/vector/forward.h"
#include "monograph/kernels/varlen_attention/vector/product.h"
#include "monograph/kernels/varlen_attention/vector/rows.h"
#include "monograph/kernels/varlen_attention/vector/softmax_row.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

template <class V, class T>
struct FewQueries {
  using L = Lanes<V>;
  static constexpr std::int64_t kKeys = VectorForward<V, T>::kKeys;
  static constexpr std::int64_t kPairs = 4;  // of vectors of the output in registers

  // A row is one query of one head of the group.
  struct Scratch {
    float *q, *keys, *scores, *out, *peak, *sum;
  };
  static Scratch scratch(const AttentionProblem& p, BumpAllocator& allocator) {
    const std::int64_t rows = kFewQueries * static_cast<std::int64_t>(p.heads / p.kv_heads);
    Scratch result;
    result.q = allocator.take<float>(rows * padded(p.key_size));
    result.keys = allocator.take<float>(kKeys * padded(p.key_size));
    result.scores = allocator.take<float>(rows * kKeys);
    result.out = allocator.take<float>(rows * padded(p.value_size));
    result.peak = allocator.take<float>(rows);
    result.sum = allocator.take<float>(rows);
    return result;
  }
  static std::size_t scratch_bytes(const AttentionProblem& p) {
    BumpAllocator allocator{nullptr};
    scratch(p, allocator);
    return allocator.bytes();
  }
  static std::size_t packed_bytes(const AttentionProblem&, const Document&) { return 0; }
  static void pack(const ForwardUnit&, std::int64_t) {}

  // Rows of a token's heads lie pages apart, where the hardware's prefetchers do not follow.
  static constexpr std::int64_t kAhead = 16;
  [[gnu::always_inline]] static void fetch(const T* row, std::int64_t size) {
    for (std::int64_t c = 0; c < size; c += 64 / static_cast<std::int64_t>(sizeof(T)))
      __builtin_prefetch(row + c);
  }

  // Of `size` outputs so many are in pairs of vectors as load_two() gives them, the rest in order.
  [[gnu::always_inline]] static std::int64_t paired(std::int64_t size) {
    return size / (2 * L::kLanes) * (2 * L::kLanes);
  }

  // out in the order of the sums, times `factor`; 0 for a row that saw nothing, even where the
  // document holds NaN.
  static void narrow_output(const float* in, float factor, std::int64_t size, T* out) {
    for (std::int64_t c = 0; c < size; ++c) {
      const std::int64_t at = c % (2 * L::kLanes);
      const bool split = L::template kSplits<T> && c < paired(size);
      const std::int64_t from = split ? c - at + at / 2 + at % 2 * L::kLanes : c;
      out[c] = from_float<T>(factor == 0 ? 0.f : in[from] * factor);
    }
  }

  // out[..] += (sum over keys of p[j] * v[j][..]) for kCount pairs of vectors: one chain from 0 per
  // block, then added, as product() does it.
  template <std::int64_t kCount>
  [[gnu::always_inline]] static void add_values(const float* p, const T* v, std::ptrdiff_t stride,
                                                std::int64_t keys, float* out) {
    constexpr auto at = [](auto n) { return static_cast<std::int64_t>(n()) * L::kLanes; };
    typename L::F32 sum[2 * kCount];
    unrolled<2 * kCount>([&](auto n) __attribute__((always_inline)) { sum[n] = L::set(0.f); });
    for (std::int64_t j = 0; j < keys; ++j, v += stride) {
      if (j + kAhead < keys) fetch(v + kAhead * stride, 2 * kCount * L::kLanes);
      const typename L::F32 weight = L::set(p[j]);
      unrolled<kCount>([&](auto n) __attribute__((always_inline)) {
        typename L::F32 x, y;
        L::load_two(v + 2 * at(n), x, y);
        sum[2 * n] = L::fma(weight, x, sum[2 * n]);
        sum[2 * n + 1] = L::fma(weight, y, sum[2 * n + 1]);
      });
    }
    unrolled<2 * kCount>([&](auto n) __attribute__((always_inline)) {
      L::store(out + at(n), L::add(L::load(out + at(n)), sum[n]));
    });
  }

  // The same of the `count` elements, at most a vector, behind the pairs.
  static void add_last_values(const float* p, const T* v, std::ptrdiff_t stride, std::int64_t keys,
                              std::int64_t count, float* out) {
    typename L::F32 sum = L::set(0.f);
    float row[L::kLanes] = {};
    for (std::int64_t j = 0; j < keys; ++j, v += stride) {
      for (std::int64_t c = 0; c < count; ++c) row[c] = to_float(v[c]);
      sum = L::fma(L::set(p[j]), L::load(row), sum);
    }
    L::store(out, L::add(L::load(out), sum));
  }

  static void add_all_values(const float* p, const T* v, std::ptrdiff_t stride, std::int64_t keys,
                             std::int64_t size, float* out) {
    std::int64_t c = 0;
    for (; c + 2 * kPairs * L::kLanes <= size; c += 2 * kPairs * L::kLanes)
      add_values<kPairs>(p, v + c, stride, keys, out + c);
    for (; c + 2 * L::kLanes <= size; c += 2 * L::kLanes)
      add_values<1>(p, v + c, stride, keys, out + c);
    for (; c < size; c += L::kLanes)
      add_last_values(p, v + c, stride, keys, size - c < L::kLanes ? size - c : L::kLanes, out + c);
  }

  // Scores of all rows against the packed block of keys; fewer rows at a time change no bit.
  static void score(const Scratch& s, std::int64_t rows, std::int64_t size, std::int64_t width) {
    std::int64_t r = 0;
    const auto some = [&]<std::int64_t kRows>() __attribute__((always_inline)) {
      for (; r + kRows <= rows; r += kRows)
        product_rows<V, kRows>({s.q + r * width, width, 1}, s.keys, kKeys, s.scores + r * kKeys,
                               kKeys, kKeys, size, /*accumulate=*/false);
    };
    some.template operator()<4>();
    some.template operator()<2>();
    some.template operator()<1>();
  }

  static void attend(const ForwardUnit& unit, std::int64_t block, std::byte* memory) {
    const AttentionProblem& p = unit.job.problem;
    const Document& d = unit.document;
    const Visibility sees = visibility(p, d);
    BumpAllocator own{memory};
    const Scratch s = scratch(p, own);
    const std::int64_t i = block * kFewQueries;
    const std::int64_t queries = d.queries - i < kFewQueries ? d.queries - i : kFewQueries;
    const std::int64_t rows = queries * static_cast<std::int64_t>(unit.group());
    const std::int64_t key_size = static_cast<std::int64_t>(p.key_size);
    const std::int64_t key_width = padded(p.key_size), width = padded(p.value_size);
    const auto query = [&](std::int64_t row) { return i + row % queries; };
    const auto head = [&](std::int64_t row) {
      return unit.kv_head * unit.group() + static_cast<std::size_t>(row / queries);
    };
    for (std::int64_t r = 0; r < rows; ++r) {
      widen_row<V>(row_of<T>(unit.job.q, d.query_begin + query(r), head(r)), key_size, key_width,
                   s.q + r * key_width);
      s.peak[r] = kNoScore;
      s.sum[r] = 0;
    }
    clear_floats<V>(s.out, rows * width);
    const std::int64_t end_of_keys = sees.end(i + queries - 1);
    float row[kLargestAttentionHead];
    for (std::int64_t j = sees.begin(i) / kKeys * kKeys; j < end_of_keys; j += kKeys) {
      const std::int64_t count = end_of_keys - j < kKeys ? end_of_keys - j : kKeys;
      widen_transposed<V, T>(unit.job.k, d.key_begin + j, count, unit.kv_head, key_size, kKeys, row,
                             s.keys);
      score(s, rows, key_size, key_width);
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t begin = sees.begin(query(r)) - j, end = sees.end(query(r)) - j;
        const std::int64_t first = begin < 0 ? 0 : begin, last = end > kKeys ? kKeys : end;
        if (first >= last) continue;
        float* const scores = s.scores + r * kKeys;
        softmax_row<V>(p, scores, kKeys, first, last, s.peak[r], s.sum[r], s.out + r * width,
                       width);
        const T* const v = row_of<T>(unit.job.v, d.key_begin + j + first, unit.kv_head);
        add_all_values(scores + first, v, unit.job.v.token_stride, last - first,
                       static_cast<std::int64_t>(p.value_size), s.out + r * width);
      }
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      float* const lse = unit.job.lse + head(r) * p.query_tokens +
                         static_cast<std::size_t>(d.query_begin + query(r));
      const float inverse = close_row(s.peak[r], s.sum[r], p.sinks, head(r), lse);
      narrow_output(s.out + r * width, inverse, static_cast<std::int64_t>(p.value_size),
                    row_of<T>(unit.job.out, d.query_begin + query(r), head(r)));
    }
  }

  static constexpr ForwardKernel kKernel = {kFewQueries,   kKeys, packed_bytes,
                                            scratch_bytes, pack,  attend};
};

}  // namespace monograph
