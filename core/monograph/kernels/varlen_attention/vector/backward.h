// The backward in fp32 on any vector vocabulary V, for storage type T: blocks of 48 queries by 64
// keys, S = Q K', dP = dO V', P = exp(S - lse), dS = P (dP - delta), dV += P' dO, dK += dS' Q, dQ
// += dS K.
#pragma once

#include "monograph/cpu/bump_allocator.h"
#include "monograph/kernels/varlen_attention/vector/product.h"
#include "monograph/kernels/varlen_attention/vector/rows.h"

namespace monograph {

template <class V, class T>
struct VectorBackward {
  using L = Lanes<V>;
  using F32 = typename L::F32;
  static constexpr std::int64_t kQueries = 48, kKeys = 64;

  struct Queries {
    float *q, *dout, *lse, *delta;  // [queries, width]; lse in log2
    bool* nonfinite;                // per block: its q or dout holds NaN or an infinity
  };
  struct Packed {
    float *k, *k_transposed, *v_transposed;  // blocks of kKeys: [kKeys, key_width], [size, kKeys]
    bool* nonfinite;                         // per block: its k holds NaN or an infinity
    std::byte* queries;
    std::int64_t query_bytes;
  };
  struct Scratch {
    float *scores, *dscores, *dk, *dv, *dq;
  };

  static std::int64_t blocks(std::int64_t tokens, std::int64_t block) {
    return (tokens + block - 1) / block;
  }

  // Flags take whole pages, so that the arrays after them keep their sets of the L1 cache: shifted
  // by 64 bytes, the products were 7 % slower.
  static std::int64_t whole_pages(std::int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

  static Queries queries_at(const AttentionProblem& p, const Document& d, std::byte* memory,
                            BumpAllocator& allocator) {
    const std::int64_t count = blocks(d.queries, kQueries) * kQueries;
    allocator.next = memory;
    Queries result;
    result.q = allocator.take<float>(count * padded(p.key_size));
    result.dout = allocator.take<float>(count * padded(p.value_size));
    result.lse = allocator.take<float>(count);
    result.delta = allocator.take<float>(count);
    result.nonfinite = allocator.take<bool>(whole_pages(count / kQueries));
    return result;
  }
  static Packed packed(const AttentionProblem& p, const Document& d, BumpAllocator& allocator) {
    const std::int64_t keys = blocks(d.keys, kKeys) * kKeys;
    Packed result;
    result.nonfinite = allocator.take<bool>(whole_pages(keys / kKeys));
    result.k = allocator.take<float>(keys * padded(p.key_size));
    result.k_transposed = allocator.take<float>(keys * padded(p.key_size));
    result.v_transposed = allocator.take<float>(keys * padded(p.value_size));
    result.queries = allocator.next;
    BumpAllocator one{nullptr};
    queries_at(p, d, nullptr, one);
    result.query_bytes = static_cast<std::int64_t>(one.bytes());
    return result;
  }
  static Queries slot_of(const BackwardUnit& unit, std::size_t slot) {
    BumpAllocator allocator{unit.packed};
    const Packed all = packed(unit.job.problem, unit.document, allocator);
    return queries_at(unit.job.problem, unit.document,
                      all.queries + static_cast<std::int64_t>(slot) * all.query_bytes, allocator);
  }
  static std::size_t packed_bytes(const AttentionProblem& p, const Document& d, std::size_t slots) {
    BumpAllocator allocator{nullptr};
    const Packed all = packed(p, d, allocator);
    return allocator.bytes() + slots * static_cast<std::size_t>(all.query_bytes);
  }
  static Scratch scratch(const AttentionProblem& p, BumpAllocator& allocator) {
    Scratch result;
    result.scores = allocator.take<float>(kQueries * kKeys);
    result.dscores = allocator.take<float>(kQueries * kKeys);
    result.dk = allocator.take<float>(kKeys * padded(p.key_size));
    result.dv = allocator.take<float>(kKeys * padded(p.value_size));
    result.dq = result.dk;  // no phase sums a block of each
    return result;
  }
  static std::size_t scratch_bytes(const AttentionProblem& p) {
    BumpAllocator allocator{nullptr};
    scratch(p, allocator);
    return allocator.bytes();
  }
  static std::size_t sums_bytes(const AttentionProblem& p, const Document& d) {
    const std::int64_t keys = blocks(d.keys, kKeys) * kKeys;
    const std::int64_t floats = keys * (padded(p.key_size) + padded(p.value_size)) +
                                blocks(d.queries, kQueries) * kQueries * padded(p.key_size);
    return static_cast<std::size_t>(floats) * sizeof(float);
  }

  static void pack_keys(const BackwardUnit& unit, std::int64_t block) {
    const AttentionProblem& p = unit.job.problem;
    const Document& d = unit.document;
    BumpAllocator allocator{unit.packed};
    const Packed to = packed(p, d, allocator);
    const std::int64_t j = block * kKeys, rows = d.keys - j < kKeys ? d.keys - j : kKeys;
    const std::int64_t width = padded(p.key_size), size = static_cast<std::int64_t>(p.key_size);
    float row[kLargestAttentionHead];
    widen_transposed<V, T>(unit.job.k, d.key_begin + j, rows, unit.kv_head, size, kKeys, row,
                           to.k_transposed + j * width);
    widen_transposed<V, T>(unit.job.v, d.key_begin + j, rows, unit.kv_head,
                           static_cast<std::int64_t>(p.value_size), kKeys, row,
                           to.v_transposed + j * padded(p.value_size));
    for (std::int64_t r = 0; r < rows; ++r)
      widen_row<V>(row_of<T>(unit.job.k, d.key_begin + j + r, unit.kv_head), size, width,
                   to.k + (j + r) * width);
    clear_floats<V>(to.k + (j + rows) * width, (kKeys - rows) * width);
    to.nonfinite[block] = any_nonfinite<V>(to.k + j * width, rows * width);
  }

  static void pack_queries(const BackwardUnit& unit, std::size_t head, std::size_t slot,
                           std::int64_t block) {
    const AttentionProblem& p = unit.job.problem;
    const Document& d = unit.document;
    const Queries to = slot_of(unit, slot);
    const std::int64_t key_width = padded(p.key_size), value_width = padded(p.value_size);
    const std::int64_t value_size = static_cast<std::int64_t>(p.value_size);
    const std::int64_t last =
        (block + 1) * kQueries < d.queries ? (block + 1) * kQueries : d.queries;
    const float* const lse =
        unit.job.lse + head * p.query_tokens + static_cast<std::size_t>(d.query_begin);
    float row[kLargestAttentionHead];
    for (std::int64_t i = block * kQueries; i < last; ++i) {
      widen_row<V>(row_of<T>(unit.job.q, d.query_begin + i, head),
                   static_cast<std::int64_t>(p.key_size), key_width, to.q + i * key_width);
      float* const dout = to.dout + i * value_width;
      widen_row<V>(row_of<T>(unit.job.dout, d.query_begin + i, head), value_size, value_width,
                   dout);
      widen_row<V>(row_of<T>(unit.job.out, d.query_begin + i, head), value_size, value_width, row);
      F32 sum = L::set(0.f);
      for (std::int64_t c = 0; c < value_width; c += L::kLanes)
        sum = L::fma(L::load(dout + c), L::load(row + c), sum);
      to.delta[i] = L::reduce_add(sum);
      to.lse[i] = lse[i] * kLog2E;
    }
    const std::int64_t first = block * kQueries;
    to.nonfinite[block] =
        any_nonfinite<V>(to.q + first * key_width, (last - first) * key_width) ||
        any_nonfinite<V>(to.dout + first * value_width, (last - first) * value_width);
  }

  // d loss / d sink = -sum over queries of p(sink) * delta, which is 0 for a query without keys,
  // whatever its dout.
  static float sink_gradient(const BackwardUnit& unit, std::size_t head, std::size_t slot) {
    const Queries q = slot_of(unit, slot);
    const float sink = unit.job.problem.sinks[head] * kLog2E;
    float sum = 0;
    if (unit.document.keys == 0) return sum;
    const Visibility sees = visibility(unit.job.problem, unit.document);
    for (std::int64_t i = sees.first_with_keys(); i < unit.document.queries; ++i)
      sum -= __builtin_exp2f(sink - q.lse[i]) * q.delta[i];
    return sum;
  }

  // One row: scores to P, dscores (dP) to dS; 0 outside [begin, end).
  static void differentiate_row(const AttentionProblem& p, float lse, float delta,
                                std::int64_t begin, std::int64_t end, float* scores,
                                float* dscores) {
    const bool cap = p.softcap > 0;
    const F32 inner = L::set(cap ? p.scale / p.softcap : p.scale * kLog2E);
    const F32 outer = L::set(p.softcap * kLog2E);
    for (std::int64_t j = 0; j < kKeys; j += L::kLanes) {
      F32 x = L::mul(L::load(scores + j), inner), slope = L::set(1.f);
      if (cap) {
        x = tanh_of<V>(x);
        slope = L::sub(slope, L::mul(x, x));
        x = L::mul(x, outer);
      }
      // At most 1, whatever rounding does to huge scores.
      const F32 probability = exp2_of<V>(L::min(L::set(0.f), L::sub(x, L::set(lse))));
      const F32 ds = L::mul(probability, L::sub(L::load(dscores + j), L::set(delta)));
      L::store(scores + j, probability);
      L::store(dscores + j, L::mul(ds, slope));
    }
    for (std::int64_t j = 0; j < begin; ++j) scores[j] = dscores[j] = 0;
    for (std::int64_t j = end; j < kKeys; ++j) scores[j] = dscores[j] = 0;
  }

  // Adds what keys [j, j + kKeys) and queries [i, i + kQueries) give; null: not wanted.
  static void run(const BackwardUnit& unit, const Visibility& sees, const Packed& from,
                  const Queries& q, const Scratch& s, std::int64_t j, std::int64_t i, float* dk,
                  float* dv, float* dq) {
    const AttentionProblem& p = unit.job.problem;
    const Document& d = unit.document;
    const std::int64_t rows = d.queries - i < kQueries ? d.queries - i : kQueries;
    const std::int64_t keys = d.keys - j < kKeys ? d.keys - j : kKeys;
    if (!sees.touches(i, i + rows, j, j + keys)) return;
    const std::int64_t kw = padded(p.key_size), vw = padded(p.value_size);
    std::int64_t first[kQueries], last[kQueries];
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t begin = sees.begin(i + r) - j, end = sees.end(i + r) - j;
      first[r] = begin < 0 ? 0 : begin > kKeys ? kKeys : begin;
      last[r] = end < first[r] ? first[r] : end > kKeys ? kKeys : end;
    }
    const bool whole = sees.covers(i, i + rows, j, j + kKeys);
    const Within seen = whole ? Within{} : Within{first, last};
    product_of<V>({q.q + i * kw, kw, 1}, from.k_transposed + j * kw, kKeys, s.scores, kKeys, rows,
                  kKeys, static_cast<std::int64_t>(p.key_size), seen);
    product_of<V>({q.dout + i * vw, vw, 1}, from.v_transposed + j * vw, kKeys, s.dscores, kKeys,
                  rows, kKeys, static_cast<std::int64_t>(p.value_size), seen);
    for (std::int64_t r = 0; r < rows; ++r)
      differentiate_row(p, q.lse[i + r], q.delta[i + r], first[r], last[r], s.scores + r * kKeys,
                        s.dscores + r * kKeys);
    const bool finite = !from.nonfinite[j / kKeys] && !q.nonfinite[i / kQueries];
    const auto add = finite || whole ? add_product<V> : product_within<V>;
    if (dk != nullptr) {
      std::int64_t begin[kKeys], end[kKeys];
      if (!whole) seen_by(seen, rows, begin, end);
      const Within seeing = whole ? Within{} : Within{begin, end};
      add({s.scores, 1, kKeys}, q.dout + i * vw, vw, dv, vw, kKeys, vw, rows, seeing);
      add({s.dscores, 1, kKeys}, q.q + i * kw, kw, dk, kw, kKeys, kw, rows, seeing);
    }
    if (dq != nullptr)
      add({s.dscores, kKeys, 1}, from.k + j * kw, kw, dq, kw, rows, kw, kKeys, seen);
  }

  // The rows that see a key, from the keys that a row sees. Both ends of these ascend, so they are
  // a range too.
  static void seen_by(const Within& seen, std::int64_t rows, std::int64_t* begin,
                      std::int64_t* end) {
    for (std::int64_t j = 0; j < kKeys; ++j) begin[j] = rows, end[j] = 0;
    for (std::int64_t r = rows; r-- > 0;)
      for (std::int64_t j = seen.begin[r]; j < seen.end[r]; ++j) {
        begin[j] = r;
        end[j] = end[j] == 0 ? r + 1 : end[j];
      }
  }

  static void write_keys(const BackwardUnit& unit, std::int64_t j, const float* dk,
                         const float* dv) {
    const AttentionProblem& p = unit.job.problem;
    const Document& d = unit.document;
    for (std::int64_t r = 0; r < kKeys && j + r < d.keys; ++r) {
      const std::int64_t token = d.key_begin + j + r;
      narrow_row<V>(dk + r * padded(p.key_size), p.scale, static_cast<std::int64_t>(p.key_size),
                    row_of<T>(unit.job.dk, token, unit.kv_head));
      narrow_row<V>(dv + r * padded(p.value_size), 1.f, static_cast<std::int64_t>(p.value_size),
                    row_of<T>(unit.job.dv, token, unit.kv_head));
    }
  }
  static void write_queries(const BackwardUnit& unit, std::size_t head, std::int64_t i,
                            const float* dq) {
    const AttentionProblem& p = unit.job.problem;
    const Document& d = unit.document;
    for (std::int64_t r = 0; r < kQueries && i + r < d.queries; ++r)
      narrow_row<V>(dq + r * padded(p.key_size), p.scale, static_cast<std::int64_t>(p.key_size),
                    row_of<T>(unit.job.dq, d.query_begin + i + r, head));
  }

  static void differentiate(const BackwardUnit& unit, std::byte* memory, std::byte* sums,
                            float* dsinks) {
    const AttentionProblem& p = unit.job.problem;
    const Document& d = unit.document;
    const Visibility sees = visibility(p, d);
    BumpAllocator shared{unit.packed}, own{memory};
    const Packed from = packed(p, d, shared);
    const Scratch s = scratch(p, own);
    const std::int64_t kw = padded(p.key_size), vw = padded(p.value_size);
    const std::int64_t keys = blocks(d.keys, kKeys) * kKeys;
    const std::int64_t queries = blocks(d.queries, kQueries) * kQueries;
    float* const dk = reinterpret_cast<float*>(sums);
    float *const dv = dk + keys * kw, *const dq = dv + keys * vw;
    clear_floats<V>(dk, keys * (kw + vw));
    for (std::int64_t b = 0; b * kKeys < keys; ++b) pack_keys(unit, b);
    const Queries q = slot_of(unit, 0);
    for (std::size_t g = 0; g < unit.group(); ++g) {
      const std::size_t head = unit.kv_head * unit.group() + g;
      for (std::int64_t b = 0; b * kQueries < queries; ++b) pack_queries(unit, head, 0, b);
      clear_floats<V>(dq, queries * kw);
      if (dsinks != nullptr) dsinks[head] = sink_gradient(unit, head, 0);
      for (std::int64_t j = 0; j < keys; j += kKeys)
        for (std::int64_t i = 0; i < queries; i += kQueries)
          run(unit, sees, from, q, s, j, i, dk + j * kw, dv + j * vw, dq + i * kw);
      for (std::int64_t i = 0; i < queries; i += kQueries)
        write_queries(unit, head, i, dq + i * kw);
    }
    for (std::int64_t j = 0; j < keys; j += kKeys) write_keys(unit, j, dk + j * kw, dv + j * vw);
  }

  static void key_gradients(const BackwardUnit& unit, std::int64_t block, std::byte* memory) {
    const AttentionProblem& p = unit.job.problem;
    const Visibility sees = visibility(p, unit.document);
    BumpAllocator shared{unit.packed}, own{memory};
    const Packed from = packed(p, unit.document, shared);
    const Scratch s = scratch(p, own);
    clear_floats<V>(s.dk, kKeys * padded(p.key_size));
    clear_floats<V>(s.dv, kKeys * padded(p.value_size));
    for (std::size_t g = 0; g < unit.group(); ++g) {
      const Queries q = slot_of(unit, g);
      for (std::int64_t i = 0; i < unit.document.queries; i += kQueries)
        run(unit, sees, from, q, s, block * kKeys, i, s.dk, s.dv, nullptr);
    }
    write_keys(unit, block * kKeys, s.dk, s.dv);
  }

  static void query_gradients(const BackwardUnit& unit, std::size_t g, std::int64_t block,
                              std::byte* memory) {
    const AttentionProblem& p = unit.job.problem;
    const Visibility sees = visibility(p, unit.document);
    BumpAllocator shared{unit.packed}, own{memory};
    const Packed from = packed(p, unit.document, shared);
    const Scratch s = scratch(p, own);
    const Queries q = slot_of(unit, g);
    clear_floats<V>(s.dq, kQueries * padded(p.key_size));
    for (std::int64_t j = 0; j < unit.document.keys; j += kKeys)
      run(unit, sees, from, q, s, j, block * kQueries, nullptr, nullptr, s.dq);
    write_queries(unit, unit.kv_head * unit.group() + g, block * kQueries, s.dq);
  }

  static constexpr BackwardKernel kKernel = {
      kQueries,     kKeys,         packed_bytes,  scratch_bytes, sums_bytes,     pack_keys,
      pack_queries, sink_gradient, differentiate, key_gradients, query_gradients};
};

}  // namespace monograph
