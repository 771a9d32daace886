// Every variant against attention written out in double, then the promises: a document's bits
// depend neither on its neighbours nor on threads, nothing leaks between documents, gaps are zero.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "monograph/base/error.h"
#include "monograph/kernels/varlen_attention/tests/written_out.h"
#include "monograph/kernels/varlen_attention/unit.h"

namespace monograph {
namespace {

const Shape kShapes[] = {
    {.lengths = {{1, 1}}},                                     // the smallest
    {.lengths = {{0, 0}, {5, 5}, {0, 7}, {3, 0}}},             // empty, keys or queries only
    {.lengths = {{31, 31}, {32, 32}, {33, 33}}},               // around a strip
    {.lengths = {{129, 129}, {257, 257}}, .heads = 1},         // around a block
    {.lengths = {{48, 64}, {49, 65}, {96, 128}}},              // around the vector variants' blocks
    {.lengths = {{1, 300}, {4, 129}, {5, 40}, {2, 2}}},        // few queries, and one too many
    {.lengths = {{40, 9}}},                                    // queries that see no key
    {.lengths = {{40, 9}}, .sinks = true},                     // ... but a sink
    {.lengths = {{70, 70}}, .heads = 6, .kv_heads = 2},        // groups of three
    {.lengths = {{50, 50}}, .key_size = 8, .value_size = 40},  // below and between vectors
    {.lengths = {{50, 50}}, .key_size = 5, .value_size = 3},   // odd sizes
    {.lengths = {{40, 40}}, .key_size = 192, .value_size = 128},  // keys wider than values
    {.lengths = {{40, 40}}, .key_size = 256, .value_size = 256},
    {.lengths = {{90, 90}, {20, 70}}, .window = 1},
    {.lengths = {{150, 150}, {4, 200}}, .window = 33},  // blocks left of the window
    {.lengths = {{150, 150}, {30, 20}}, .causal = false},
    {.lengths = {{150, 150}, {3, 90}}, .causal = false, .window = 20},
    {.lengths = {{80, 80}, {2, 80}}, .softcap = 2},
    {.lengths = {{80, 80}, {2, 80}}, .sinks = true, .scale = 1},
    {.lengths = {{60, 60}, {1, 60}}, .gap = 3, .unused_keys = 5, .row_gap = 7},
    {.lengths = {{40, 40}}, .scale = 8},          // one key takes all
    {.lengths = {{40, 40}, {3, 9}}, .scale = 0},  // every key alike
    {.lengths = {{40, 40}}, .softcap = 2, .scale = 0},
};

TEST(VarlenAttention, EveryVariantMatchesTheReference) {
  unsigned seed = 1;
  for (const Shape& shape : kShapes) {
    ++seed;
    for_variants([&](const AttentionVariant& variant) {
      SCOPED_TRACE("shape " + std::to_string(&shape - kShapes));
      Case c(shape, variant.dtype, seed);
      c.run(variant);
      expect_reference(c, reference(c));
    });
    if (HasFatalFailure()) return;
  }
}

Shape random_shape(std::mt19937& rng) {
  const auto pick = [&](std::initializer_list<int> of) { return of.begin()[rng() % of.size()]; };
  Shape s;
  for (int d = pick({1, 2, 3, 5}); d > 0; --d) {
    const int lq = static_cast<int>(rng() % (rng() % 4 == 0 ? 140 : 40));
    s.lengths.push_back({lq, pick({lq, lq, lq, lq + 17, lq / 2, 0})});
  }
  s.kv_heads = pick({1, 2});
  s.heads = s.kv_heads * pick({1, 2, 4});
  s.key_size = pick({8, 16, 20, 32, 64, 72});
  s.value_size = pick({8, 16, 32, 33, 64});
  s.causal = rng() % 3 != 0;
  s.window = rng() % 2 != 0 ? 0 : pick({1, 7, 40});
  s.softcap = rng() % 4 != 0 ? 0.f : 5.f;
  s.sinks = rng() % 3 == 0;
  s.gap = pick({0, 0, 3});
  s.unused_keys = pick({0, 0, 2});
  s.row_gap = pick({0, 1, 8});
  return s;
}

TEST(VarlenAttention, RandomPackingsAndOptions) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    for_variants([&](const AttentionVariant& variant) {
      std::mt19937 rng(seed);
      Case c(random_shape(rng), variant.dtype, seed);
      c.run(variant);
      expect_reference(c, reference(c));
    });
    if (HasFatalFailure()) return;
  }
}

// The rows of document `d` of `c` in a case of its own.
Case alone(const Case& c, std::size_t d) {
  Shape s = c.shape;
  s.lengths = {c.shape.lengths[d]};
  s.gap = 0;
  Case one(s, c.q.dtype, 0);
  const auto [lq, lk] = s.lengths[0];
  one.sinks = c.sinks;
  one.q.copy_rows(0, c.q, c.query_offsets[d], lq);
  one.dout.copy_rows(0, c.dout, c.query_offsets[d], lq);
  one.k.copy_rows(0, c.k, c.key_offsets[d], lk);
  one.v.copy_rows(0, c.v, c.key_offsets[d], lk);
  return one;
}

void expect_same_document(const Case& a, std::size_t da, const Case& b, std::size_t db) {
  const auto [lq, lk] = a.shape.lengths[da];
  const std::size_t qa = a.query_offsets[da], qb = b.query_offsets[db];
  const std::size_t ka = a.key_offsets[da], kb = b.key_offsets[db];
  EXPECT_EQ(a.out.rows(qa, lq), b.out.rows(qb, lq)) << "out";
  EXPECT_EQ(a.dq.rows(qa, lq), b.dq.rows(qb, lq)) << "dq";
  EXPECT_EQ(a.dk.rows(ka, lk), b.dk.rows(kb, lk)) << "dk";
  EXPECT_EQ(a.dv.rows(ka, lk), b.dv.rows(kb, lk)) << "dv";
  for (std::size_t h = 0; h < a.shape.heads; ++h)
    for (std::size_t i = 0; i < static_cast<std::size_t>(lq); ++i)
      EXPECT_EQ(std::bit_cast<std::uint32_t>(a.lse[h * a.q.tokens + qa + i]),
                std::bit_cast<std::uint32_t>(b.lse[h * b.q.tokens + qb + i]));
}

const Shape kMixed = {.lengths = {{130, 130}, {1, 70}, {33, 33}, {0, 0}, {260, 260}, {17, 40}},
                      .heads = 4,
                      .kv_heads = 2,
                      .key_size = 40,
                      .value_size = 24,
                      .sinks = true};

TEST(VarlenAttention, ADocumentHasTheSameBitsAloneAndPacked) {
  for_variants([&](const AttentionVariant& variant) {
    Case packed(kMixed, variant.dtype, 5);
    packed.run(variant);
    for (std::size_t d = 0; d < kMixed.lengths.size(); ++d) {
      Case one = alone(packed, d);
      one.run(variant);
      expect_same_document(packed, d, one, 0);
    }
  });
}

// Decoding and prefilling in pieces give what the whole sequence gives; not on matrix units, whose
// few queries are served by vector code.
TEST(VarlenAttention, AQueryHasTheSameBitsAloneAndInItsSequence) {
  const Shape whole[] = {
      {.lengths = {{300, 300}}, .heads = 4, .kv_heads = 2, .key_size = 128, .value_size = 128},
      {.lengths = {{300, 300}}, .key_size = 40, .value_size = 24, .softcap = 5, .sinks = true},
      {.lengths = {{300, 300}}, .key_size = 80, .value_size = 72, .window = 90, .row_gap = 3},
  };
  for (const Shape& shape : whole)
    for_variants([&](const AttentionVariant& variant) {
      if (variant.run->few == nullptr) return;
      Case sequence(shape, variant.dtype, 11);
      sequence.run(variant);
      for (const int keys : {2, 64, 65, 257, 300})
        for (const int queries : {1, 4, 5}) {
          if (queries > keys) continue;
          Shape s = shape;
          s.lengths = {{queries, keys}};
          Case last(s, variant.dtype, 0);
          const std::size_t first = static_cast<std::size_t>(keys - queries);
          last.sinks = sequence.sinks;
          last.q.copy_rows(0, sequence.q, first, static_cast<std::size_t>(queries));
          last.k.copy_rows(0, sequence.k, 0, static_cast<std::size_t>(keys));
          last.v.copy_rows(0, sequence.v, 0, static_cast<std::size_t>(keys));
          last.run(variant);
          ASSERT_EQ(sequence.out.rows(first, static_cast<std::size_t>(queries)),
                    last.out.rows(0, static_cast<std::size_t>(queries)))
              << "shape " << &shape - whole << ", " << queries << " queries, " << keys << " keys";
          for (std::size_t h = 0; h < s.heads; ++h)
            for (std::size_t i = 0; i < static_cast<std::size_t>(queries); ++i)
              ASSERT_EQ(std::bit_cast<std::uint32_t>(sequence.lse[h * 300 + first + i]),
                        std::bit_cast<std::uint32_t>(last.lse[h * last.q.tokens + i]));
        }
    });
}

TEST(VarlenAttention, ThreadsDoNotChangeABit) {
  ThreadPool pool(3);
  const auto on_pool = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  Shape shape = kMixed;
  shape.lengths.push_back({520, 520});
  for_variants([&](const AttentionVariant& variant) {
    Case one(shape, variant.dtype, 6);
    one.run(variant);
    // 3 threads: the long document is cut forward; 1000: every unit of any size is cut both ways.
    for (const int threads : {3, 1000}) {
      Case many(shape, variant.dtype, 6);
      many.run(variant, on_pool, threads);
      for (std::size_t d = 0; d < shape.lengths.size(); ++d) expect_same_document(one, d, many, d);
      EXPECT_EQ(
          0, std::memcmp(one.dsinks.data(), many.dsinks.data(), one.dsinks.size() * sizeof(float)));
    }
  });
}

TEST(VarlenAttention, NanStaysInItsDocument) {
  for_variants([&](const AttentionVariant& variant) {
    Case clean(kMixed, variant.dtype, 7), dirty(kMixed, variant.dtype, 7);
    const std::size_t q0 = dirty.query_offsets[2], k0 = dirty.key_offsets[2];
    for (std::size_t t = 0; t < 33; ++t) {
      dirty.q.put(dirty.q.at(q0 + t, 0, 0), std::nanf(""));
      dirty.k.put(dirty.k.at(k0 + t, 0, 3), std::nanf(""));
      dirty.v.put(dirty.v.at(k0 + t, 1, 1), std::numeric_limits<float>::infinity());
      dirty.dout.put(dirty.dout.at(q0 + t, 2, 0), std::nanf(""));
    }
    clean.run(variant);
    dirty.run(variant);
    EXPECT_TRUE(std::isnan(dirty.out(q0 + 32, 0, 0)));
    for (const std::size_t d : {0, 1, 3, 4, 5}) expect_same_document(clean, d, dirty, d);
  });
}

TEST(VarlenAttention, RowsOutsideEveryDocumentAreZero) {
  for_variants([&](const AttentionVariant& variant) {
    Case c({.lengths = {{5, 5}, {0, 0}, {0, 0}}, .gap = 4, .unused_keys = 2}, variant.dtype, 8);
    c.run(variant);
    for (const Tensor* t : {&c.out, &c.dq})
      for (const std::size_t row : {0, 3, 9, 12})
        for (std::size_t d = 0; d < t->size; ++d) EXPECT_EQ(0, (*t)(row, 1, d));
    for (const Tensor* t : {&c.dk, &c.dv})
      for (const std::size_t row : {0, 3, 9, 10, 11, 18})
        for (std::size_t d = 0; d < t->size; ++d) EXPECT_EQ(0, (*t)(row, 0, d));
    EXPECT_EQ(0, c.lse[0]);
  });
}

TEST(VarlenAttention, RejectsWhatContradictsItself) {
  const AttentionVariant& variant = varlen_attention_variants().back();
  const auto fails = [&](auto change) {
    Case c({.lengths = {{3, 3}, {4, 4}}}, variant.dtype, 9);
    AttentionProblem p = c.problem();
    change(c, p);
    EXPECT_THROW(varlen_attention(
                     {p, c.q.view(), c.k.view(), c.v.view(), c.out.mutable_view(), c.lse.data()},
                     serial_for, 1),
                 Error);
  };
  fails([](Case& c, AttentionProblem&) { c.query_offsets[2] = 8; });  // beyond the tokens
  fails([](Case& c, AttentionProblem&) { c.query_offsets[1] = 8; });  // descends
  fails([](Case& c, AttentionProblem&) { c.key_offsets[0] = -1; });
  fails([](Case& c, AttentionProblem&) { c.key_lengths[1] = 5; });  // more than the document holds
  fails([](Case&, AttentionProblem& p) { p.kv_heads = 3; });
  fails([](Case&, AttentionProblem& p) { p.key_size = 513; });
  fails([](Case&, AttentionProblem& p) { p.scale = -1; });
  fails([](Case&, AttentionProblem& p) { p.window = -1; });
}

}  // namespace
}  // namespace monograph
