// What a query may not see has no influence, whatever its value: NaN and infinities are strewn over
// q, k, v and dout, and every result they may not reach keeps the bits it has without them.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "monograph/kernels/varlen_attention/tests/written_out.h"

namespace monograph {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kPoisons[] = {std::nanf(""), kInf, -kInf};

const Shape kShapes[] = {
    {.lengths = {{64, 64}}},  // the smallest that failed: v[63] reached row 0
    {.lengths = {{33, 33}, {64, 64}, {97, 97}}, .heads = 4, .kv_heads = 2, .sinks = true},
    {.lengths = {{300, 300}}, .heads = 1},              // several blocks of every kernel
    {.lengths = {{150, 150}, {4, 200}}, .window = 33},  // left of the window
    {.lengths = {{150, 150}, {3, 90}}, .causal = false, .window = 20},  // right of it too
    {.lengths = {{100, 40}, {40, 100}}},  // queries without keys; a cache
    {.lengths = {{70, 70}, {1, 60}}, .softcap = 5, .gap = 3, .unused_keys = 5, .row_gap = 7},
    {.lengths = {{50, 50}}, .key_size = 40, .value_size = 20},  // between vectors and tiles
};

// Which tokens of which head are poisoned, and what that may reach.
struct Strewn {
  std::vector<char> q, k, v, dout;  // a flag a token and head

  explicit Strewn(const Case& c)
      : q(c.q.tokens * c.q.heads), k(c.k.tokens * c.k.heads), v(k.size()), dout(q.size()) {}
};

void strew(Tensor& tensor, std::vector<char>& flags, std::size_t token, std::size_t head,
           std::size_t element, float poison) {
  tensor.put(tensor.at(token, head, element % tensor.size), poison);
  flags[token * tensor.heads + head] = 1;
}

// A few tokens at the ends of a document, where most queries see none or few of them.
Strewn poison(Case& c, float value, unsigned seed) {
  Strewn strewn(c);
  std::mt19937 rng(seed);
  for (std::size_t d = 0; d < c.shape.lengths.size(); ++d) {
    const auto [lq, lk] = c.shape.lengths[d];
    for (int n = 0; n < 3; ++n) {
      if (lk > 0) {
        const std::size_t key = c.key_offsets[d] + (n == 0 ? lk - 1 : rng() % lk);
        strew(c.v, strewn.v, key, rng() % c.shape.kv_heads, rng(), value);
        const std::size_t other = c.key_offsets[d] + lk - 1 - rng() % std::min(lk, 7);
        strew(c.k, strewn.k, other, rng() % c.shape.kv_heads, rng(), value);
      }
      if (lq > 0) {
        strew(c.q, strewn.q, c.query_offsets[d] + rng() % lq, rng() % c.shape.heads, rng(), value);
        strew(c.dout, strewn.dout, c.query_offsets[d] + rng() % lq, rng() % c.shape.heads, rng(),
              value);
      }
    }
  }
  return strewn;
}

// What the poison reaches along the pairs that see each other; a flag a token and head.
struct Reached {
  std::vector<char> scores, out, dq, dk, dv;
};

Reached reached(const Case& c, const Strewn& strewn) {
  const std::size_t heads = c.shape.heads, kv_heads = c.shape.kv_heads;
  Reached r;
  r.scores = r.out = r.dq = std::vector<char>(strewn.q.size());
  r.dk = r.dv = std::vector<char>(strewn.k.size());
  for (std::size_t d = 0; d < c.shape.lengths.size(); ++d)
    for (std::size_t h = 0; h < heads; ++h) {
      const auto [lq, lk] = c.shape.lengths[d];
      const auto key = [&, d, h](int j) {
        return (c.key_offsets[d] + static_cast<std::size_t>(j)) * kv_heads + h / (heads / kv_heads);
      };
      for (int i = 0; i < lq; ++i) {
        const std::size_t query = (c.query_offsets[d] + static_cast<std::size_t>(i)) * heads + h;
        bool scores = false, values = false;
        for (int j = 0; j < lk; ++j)
          if (visible(c.shape, i, j, lq, lk)) {
            scores |= strewn.q[query] || strewn.k[key(j)];
            values |= strewn.v[key(j)] != 0;
          }
        r.scores[query] = scores;
        r.out[query] = scores || values;
        for (int j = 0; j < lk; ++j)
          if (visible(c.shape, i, j, lq, lk)) {
            const bool dv = scores || strewn.dout[query];
            r.dq[query] |= dv || values;
            r.dk[key(j)] |= dv || values;
            r.dv[key(j)] |= dv;
          }
      }
    }
  return r;
}

// Rows that the poison does not reach have the bits of the clean run; NaN shows in all others.
void expect_kept(const Tensor& clean, const Tensor& dirty, const std::vector<char>& reached_rows,
                 bool nan, const std::string& name) {
  for (std::size_t t = 0; t < clean.tokens; ++t)
    for (std::size_t h = 0; h < clean.heads; ++h) {
      bool found = false;
      for (std::size_t e = 0; e < clean.size; ++e) {
        const double x = clean(t, h, e), y = dirty(t, h, e);
        found |= std::isnan(y);
        if (!reached_rows[t * clean.heads + h])
          ASSERT_EQ(std::bit_cast<std::uint64_t>(x), std::bit_cast<std::uint64_t>(y))
              << name << " of token " << t << ", head " << h << ", element " << e;
      }
      if (nan && reached_rows[t * clean.heads + h])
        ASSERT_TRUE(found) << name << " of token " << t << ", head " << h << " hides a NaN";
    }
}

void expect_kept(const Case& clean, const Case& dirty, const Reached& r, bool nan) {
  expect_kept(clean.out, dirty.out, r.out, nan, "out");
  expect_kept(clean.dq, dirty.dq, r.dq, nan, "dq");
  expect_kept(clean.dk, dirty.dk, r.dk, nan, "dk");
  expect_kept(clean.dv, dirty.dv, r.dv, nan, "dv");
  for (std::size_t h = 0; h < clean.shape.heads; ++h)
    for (std::size_t t = 0; t < clean.q.tokens; ++t)
      if (!r.scores[t * clean.shape.heads + h]) {
        const std::size_t at = h * clean.q.tokens + t;
        ASSERT_EQ(std::bit_cast<std::uint32_t>(clean.lse[at]),
                  std::bit_cast<std::uint32_t>(dirty.lse[at]))
            << "lse of token " << t << ", head " << h;
      }
}

TEST(VarlenAttentionNonFinite, WhatAQueryMayNotSeeHasNoInfluence) {
  ThreadPool pool(2);
  const auto on_pool = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  unsigned seed = 40;
  for (const Shape& shape : kShapes)
    for (const float value : kPoisons) {
      ++seed;
      for_variants([&](const AttentionVariant& variant) {
        SCOPED_TRACE("shape " + std::to_string(&shape - kShapes) + ", " + std::to_string(value));
        Case clean(shape, variant.dtype, seed), dirty(shape, variant.dtype, seed);
        const Reached r = reached(dirty, poison(dirty, value, seed));
        clean.run(variant);
        dirty.run(variant);
        expect_kept(clean, dirty, r, std::isnan(value));
        dirty.run(variant, on_pool, 1000);  // every unit cut
        expect_kept(clean, dirty, r, std::isnan(value));
      });
      if (HasFatalFailure()) return;
    }
}

// Against attention in double that never reads what a query may not see.
TEST(VarlenAttentionNonFinite, RowsThatSeeNothingOfItMatchTheReference) {
  for_variants([&](const AttentionVariant& variant) {
    Case c({.lengths = {{64, 64}, {20, 90}}, .window = 30}, variant.dtype, 9);
    const std::size_t last = c.key_offsets[1] - 1;
    for (std::size_t d = 0; d < 16; ++d) {
      c.v.put(c.v.at(last, 0, d), d % 2 ? kInf : -kInf);
      c.k.put(c.k.at(last, 0, d), std::nanf(""));
    }
    c.run(variant);
    // Only the last query of the first document sees that key; its own gradients reach 30 keys.
    const Reference r = reference(c);
    for (std::size_t h = 0; h < 2; ++h)
      for (std::size_t t = 0; t < c.out.tokens; ++t)
        for (std::size_t d = 0; d < 16; ++d) {
          const std::size_t i = c.out.at(t, h, d);
          if (t == last) {
            ASSERT_TRUE(std::isnan(c.out.get(i)));
          } else {
            ASSERT_NEAR(c.out.get(i), r.out[i], 2 * unit_of(variant.dtype) * r.out_size[i] + 1e-7);
            ASSERT_NEAR(c.dq.get(i), r.dq[i], 4 * unit_of(variant.dtype) * r.dq_size[i] + 1e-7);
          }
        }
  });
}

// A query without keys has out = 0: the sinks get nothing of its dout.
TEST(VarlenAttentionNonFinite, TheDoutOfAQueryWithoutKeysReachesNoSink) {
  for (const bool causal : {true, false})
    for_variants([&](const AttentionVariant& variant) {
      const Shape shape{.lengths = {{3, 3}, {1, 0}, {40, 17}}, .causal = causal, .sinks = true};
      Case clean(shape, variant.dtype, 11), dirty(shape, variant.dtype, 11);
      std::vector<std::size_t> without_keys = {3};
      for (std::size_t t = 4; causal && t < 4 + 23; ++t) without_keys.push_back(t);
      for (const std::size_t t : without_keys)
        for (std::size_t h = 0; h < shape.heads; ++h) {
          clean.dout.put(clean.dout.at(t, h, 1), 0);
          dirty.dout.put(dirty.dout.at(t, h, 1), std::nanf(""));
        }
      clean.run(variant);
      dirty.run(variant);
      ASSERT_EQ(clean.dsinks, dirty.dsinks);  // a NaN equals nothing
    });
}

// The log-sum-exp and the output that a backward is given may be poisoned where nothing else is.
TEST(VarlenAttentionNonFinite, ASavedRowReachesOnlyTheKeysItsQuerySees) {
  for_variants([&](const AttentionVariant& variant) {
    Case clean({.lengths = {{150, 150}}, .window = 20}, variant.dtype, 10);
    clean.run(variant);
    for (const bool of_lse : {true, false}) {
      Case dirty = clean;
      if (of_lse)
        dirty.lse[70] = std::nanf("");
      else
        dirty.out.put(dirty.out.at(70, 0, 3), kInf);
      dirty.run_backward(variant);
      std::vector<char> query(150 * 2), key(150), none(150);
      query[70 * 2] = 1;
      for (int j = 51; j <= 70; ++j) key[j] = 1;
      expect_kept(clean.dq, dirty.dq, query, of_lse, "dq");
      expect_kept(clean.dk, dirty.dk, key, of_lse, "dk");
      expect_kept(clean.dv, dirty.dv, of_lse ? key : none, of_lse, "dv");
      for (std::size_t d = 0; d < 16; ++d) ASSERT_FALSE(std::isfinite(dirty.dq(70, 0, d)));
    }
  });
}

}  // namespace
}  // namespace monograph
