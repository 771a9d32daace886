// The forward for a few queries against many keys (decoding): bound by reading K and V once, so
// nothing is packed. Lanes run along the head; a chunk of keys serves every query and every head of
// the group while it is in the cache.
#pragma once

#include "monograph/cpu/carver.h"
#include "monograph/kernels/varlen_attention/vector/rows.h"
#include "monograph/kernels/varlen_attention/vector/softmax_row.h"

namespace monograph {

template <class V, class T>
struct FewQueries {
  using L = Lanes<V>;
  static constexpr std::int64_t kKeys = 128;
  static constexpr std::int64_t kPairs = 4;  // of vectors of the output in registers

  // A row is one query of one head of the group.
  struct Scratch {
    float *q, *scores, *out, *peak, *sum;
  };
  static Scratch scratch(const AttentionProblem& p, Carver& carver) {
    const std::int64_t rows = kFewQueries * static_cast<std::int64_t>(p.heads / p.kv_heads);
    Scratch result;
    result.q = carver.take<float>(rows * padded(p.key_size));
    result.scores = carver.take<float>(kKeys);
    result.out = carver.take<float>(rows * padded(p.value_size));
    result.peak = carver.take<float>(rows);
    result.sum = carver.take<float>(rows);
    return result;
  }
  static std::size_t scratch_bytes(const AttentionProblem& p) {
    Carver carver{nullptr};
    scratch(p, carver);
    return carver.bytes();
  }
  static std::size_t packed_bytes(const AttentionProblem&, const Document&) { return 0; }
  static void pack(const ForwardUnit&, std::int64_t) {}

  // Rows of a token's heads lie pages apart, where the hardware's prefetchers do not follow.
  static constexpr std::int64_t kAhead = 16;
  [[gnu::always_inline]] static void fetch(const T* row, std::int64_t size) {
    for (std::int64_t c = 0; c < size; c += 64 / static_cast<std::int64_t>(sizeof(T)))
      __builtin_prefetch(row + c);
  }

  // A row as load_two() gives it: whole pairs of vectors first, the rest in order.
  static void widen_query(const T* in, std::int64_t size, float* out) {
    std::int64_t c = 0;
    for (; c + 2 * L::kLanes <= size; c += 2 * L::kLanes) {
      typename L::F32 a, b;
      L::load_two(in + c, a, b);
      L::store(out + c, a);
      L::store(out + c + L::kLanes, b);
    }
    for (; c < size; ++c) out[c] = to_float(in[c]);
  }

  // The inverse, times `factor`; 0 for a row that saw nothing, even where the document holds NaN.
  static void narrow_output(const float* in, float factor, std::int64_t size, T* out) {
    const std::int64_t paired = size / (2 * L::kLanes) * (2 * L::kLanes);
    for (std::int64_t c = 0; c < size; ++c) {
      const std::int64_t at = c % (2 * L::kLanes);
      const bool split = L::template kSplits<T> && c < paired;
      const std::int64_t from = split ? c - at + at / 2 + at % 2 * L::kLanes : c;
      out[c] = from_float<T>(factor == 0 ? 0.f : in[from] * factor);
    }
  }

  [[gnu::always_inline]] static float dot(const float* q, const T* k, std::int64_t size) {
    typename L::F32 a = L::set(0.f), b = L::set(0.f), x, y;
    std::int64_t c = 0;
    for (; c + 2 * L::kLanes <= size; c += 2 * L::kLanes) {
      L::load_two(k + c, x, y);
      a = L::fma(L::load(q + c), x, a);
      b = L::fma(L::load(q + c + L::kLanes), y, b);
    }
    float tail = 0;
    for (; c < size; ++c) tail += q[c] * to_float(k[c]);
    return L::reduce_add(L::add(a, b)) + tail;
  }

  // out[..] += sum over keys of p[j] * v[j][..] for kCount pairs of vectors.
  template <std::int64_t kCount>
  [[gnu::always_inline]] static void add_values(const float* p, const T* v, std::ptrdiff_t stride,
                                                std::int64_t keys, float* out) {
    typename L::F32 sum[2 * kCount], x, y;
    for (std::int64_t n = 0; n < 2 * kCount; ++n) sum[n] = L::load(out + n * L::kLanes);
    for (std::int64_t j = 0; j < keys; ++j, v += stride) {
      if (j + kAhead < keys) fetch(v + kAhead * stride, 2 * kCount * L::kLanes);
      const typename L::F32 weight = L::set(p[j]);
      for (std::int64_t n = 0; n < kCount; ++n) {
        L::load_two(v + 2 * n * L::kLanes, x, y);
        sum[2 * n] = L::fma(weight, x, sum[2 * n]);
        sum[2 * n + 1] = L::fma(weight, y, sum[2 * n + 1]);
      }
    }
    for (std::int64_t n = 0; n < 2 * kCount; ++n) L::store(out + n * L::kLanes, sum[n]);
  }

  static void add_all_values(const float* p, const T* v, std::ptrdiff_t stride, std::int64_t keys,
                             std::int64_t size, float* out) {
    std::int64_t c = 0;
    for (; c + 2 * kPairs * L::kLanes <= size; c += 2 * kPairs * L::kLanes)
      add_values<kPairs>(p, v + c, stride, keys, out + c);
    for (; c + 2 * L::kLanes <= size; c += 2 * L::kLanes)
      add_values<1>(p, v + c, stride, keys, out + c);
    for (; c < size; ++c)
      for (std::int64_t j = 0; j < keys; ++j) out[c] += p[j] * to_float(v[j * stride + c]);
  }

  // Keys [j, end) of the document for one row.
  static void attend_chunk(const ForwardUnit& unit, const Scratch& s, std::int64_t row,
                           std::int64_t j, std::int64_t end) {
    const AttentionProblem& p = unit.job.problem;
    const std::int64_t width = padded(p.value_size), count = end - j;
    const T* const k = row_of<T>(unit.job.k, unit.document.key_begin + j, unit.kv_head);
    const T* const v = row_of<T>(unit.job.v, unit.document.key_begin + j, unit.kv_head);
    const float* const q = s.q + row * padded(p.key_size);
    const std::int64_t size = static_cast<std::int64_t>(p.key_size);
    for (std::int64_t n = 0; n < count; ++n) {
      const T* const key = k + n * unit.job.k.token_stride;
      if (n + kAhead < count) fetch(key + kAhead * unit.job.k.token_stride, size);
      s.scores[n] = dot(q, key, size);
    }
    for (std::int64_t n = count; n < kKeys; ++n) s.scores[n] = 0;
    softmax_row<V>(p, s.scores, kKeys, 0, count, s.peak[row], s.sum[row], s.out + row * width,
                   width);
    add_all_values(s.scores, v, unit.job.v.token_stride, count,
                   static_cast<std::int64_t>(p.value_size), s.out + row * width);
  }

  static void attend(const ForwardUnit& unit, std::int64_t block, std::byte* memory) {
    const AttentionProblem& p = unit.job.problem;
    const Document& d = unit.document;
    const Visibility sees = visibility(p, d);
    Carver own{memory};
    const Scratch s = scratch(p, own);
    const std::int64_t i = block * kFewQueries;
    const std::int64_t queries = d.queries - i < kFewQueries ? d.queries - i : kFewQueries;
    const std::int64_t rows = queries * static_cast<std::int64_t>(unit.group());
    const std::int64_t key_width = padded(p.key_size), width = padded(p.value_size);
    const auto query = [&](std::int64_t row) { return i + row % queries; };
    const auto head = [&](std::int64_t row) {
      return unit.kv_head * unit.group() + static_cast<std::size_t>(row / queries);
    };
    for (std::int64_t r = 0; r < rows; ++r) {
      widen_query(row_of<T>(unit.job.q, d.query_begin + query(r), head(r)),
                  static_cast<std::int64_t>(p.key_size), s.q + r * key_width);
      s.peak[r] = kNoScore;
      s.sum[r] = 0;
    }
    clear_floats<V>(s.out, rows * width);
    for (std::int64_t j = sees.begin(i) / kKeys * kKeys; j < sees.end(i + queries - 1); j += kKeys)
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t begin = sees.begin(query(r)), end = sees.end(query(r));
        const std::int64_t first = begin > j ? begin : j;
        const std::int64_t last = end < j + kKeys ? end : j + kKeys;
        if (first < last) attend_chunk(unit, s, r, first, last);
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
