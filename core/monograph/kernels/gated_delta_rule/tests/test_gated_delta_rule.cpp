// Every variant against the recurrence in double, then the promises: a document's bits depend
// neither on its neighbours nor on threads, NaN stays in its document and head, gaps are zero.
#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/kernels/gated_delta_rule/tests/recurrence.h"

namespace monograph {
namespace {

// fp32 products leave the rounding of the result, at most half a unit in the last place; on tiles
// `factor` times what that is on average (over random numbers, root mean square).
void expect_reference(const Case& c, const Reference& r, Isa isa) {
  const bool tiles = isa >= Isa::kAmx && c.q.dtype == DType::kBFloat16;
  const auto bound = [&](DType dtype, double factor) {
    if (tiles) return factor * 1.7e-3;
    return 5e-6 + (dtype == DType::kBFloat16 ? 0x1p-8 : dtype == DType::kFloat16 ? 0x1p-11 : 0);
  };
  EXPECT_LT(distance(c.out, r.out), bound(c.out.dtype, 2)) << "out";
  EXPECT_LT(distance(c.dq, r.dq), bound(c.dq.dtype, 3)) << "dq";
  EXPECT_LT(distance(c.dk, r.dk), bound(c.dk.dtype, 3)) << "dk";
  EXPECT_LT(distance(c.dv, r.dv), bound(c.dv.dtype, 3)) << "dv";
  EXPECT_LT(distance(c.dg, r.dg), tiles ? 1e-2 : bound(c.dg.dtype, 1)) << "dg";
  EXPECT_LT(distance(c.dbeta, r.dbeta), bound(c.dbeta.dtype, 3)) << "dbeta";
  EXPECT_LT(distance(c.final_state, r.final_state), bound(DType::kFloat32, 2)) << "final_state";
  EXPECT_LT(distance(c.dstate, r.dstate), bound(DType::kFloat32, 3)) << "dstate";
}

const Shape kShapes[] = {
    {.lengths = {7}, .value_heads = 1, .key_size = 16, .value_size = 16},
    {.lengths = {0, 5, 0}, .state = true},                    // empty documents keep their state
    {.lengths = {1, 4, 5, 2}, .state = true},                 // token by token, and one too many
    {.lengths = {1, 3}, .key_size = 5, .value_size = 40},     // ... of odd sizes, from nothing
    {.lengths = {63, 64, 65}},                                // around a chunk
    {.lengths = {130, 17}, .state = true, .l2norm = false},   // several chunks
    {.lengths = {70}, .key_heads = 2, .value_heads = 6},      // groups of three
    {.lengths = {70, 20}, .key_size = 24, .value_size = 40},  // between vectors
    {.lengths = {70}, .key_size = 5, .value_size = 3, .state = true},
    {.lengths = {66}, .value_heads = 1, .key_size = 256, .value_size = 256},
    {.lengths = {80}, .key_size = 128, .value_size = 128, .narrow_gates = true},
    {.lengths = {60, 1}, .gap = 3, .row_gap = 7},
};

TEST(GatedDeltaRule, EveryVariantMatchesTheRecurrence) {
  unsigned seed = 1;
  for (const Shape& shape : kShapes) {
    ++seed;
    for_variants([&](const DeltaRuleVariant& variant) {
      SCOPED_TRACE("shape " + std::to_string(&shape - kShapes));
      Case c(shape, variant.dtype, seed);
      c.run(variant);
      expect_reference(c, reference(c), variant.isa);
    });
  }
}

// Documents with strong decays (dg is about e^-20 of the rest), with few strong ones, with keys
// that are nearly alike, and with beta up to 2, where errors of the inverse would grow.
TEST(GatedDeltaRule, HardDistributions) {
  for (const Kind kind : {Kind::kStrong, Kind::kMixed, Kind::kCorrelated, Kind::kTwice})
    for_variants([&](const DeltaRuleVariant& variant) {
      SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)));
      Case c({.lengths = {200}, .key_size = 64, .value_size = 64, .kind = kind}, variant.dtype, 40);
      c.run(variant);
      const Reference r = reference(c);
      EXPECT_LT(distance(c.dg, r.dg), 1e-2);
      expect_reference(c, r, variant.isa);
    });
}

// A token that forgets all (g of -inf and of -1e30) leaves the decays after it exact.
TEST(GatedDeltaRule, TheStrongestDecays) {
  for_variants([&](const DeltaRuleVariant& variant) {
    Case c({.lengths = {50, 3}, .value_heads = 1}, variant.dtype, 41);
    c.g.put(c.g.at(20, 0, 0), -1e30f);
    c.g.put(c.g.at(30, 0, 0), -std::numeric_limits<float>::infinity());
    c.g.put(c.g.at(51, 0, 0), -std::numeric_limits<float>::infinity());
    c.run(variant);
    expect_reference(c, reference(c), variant.isa);
  });
}

const Shape kMixed = {.lengths = {130, 1, 33, 0, 3, 70},
                      .key_heads = 2,
                      .value_heads = 4,
                      .key_size = 40,
                      .value_size = 24,
                      .state = true};

void expect_same_head(const Case& a, std::size_t da, const Case& b, std::size_t db, std::size_t h) {
  const std::size_t count = a.shape.lengths[da], ta = a.offsets[da], tb = b.offsets[db];
  const std::size_t hk = h / (a.shape.value_heads / a.shape.key_heads);
  const auto same = [&](const Numbers& x, const Numbers& y, std::size_t head, const char* name) {
    EXPECT_EQ(x.rows(ta, count, head), y.rows(tb, count, head)) << name;
  };
  same(a.out, b.out, h, "out");
  same(a.dq, b.dq, hk, "dq");
  same(a.dk, b.dk, hk, "dk");
  same(a.dv, b.dv, h, "dv");
  same(a.dg, b.dg, h, "dg");
  same(a.dbeta, b.dbeta, h, "dbeta");
  const std::size_t bytes = a.shape.key_size * a.shape.value_size * sizeof(float);
  EXPECT_EQ(0, std::memcmp(a.final_state.data() + a.state_at(da, h),
                           b.final_state.data() + b.state_at(db, h), bytes));
  EXPECT_EQ(0, std::memcmp(a.dstate.data() + a.state_at(da, h), b.dstate.data() + b.state_at(db, h),
                           bytes));
}

void expect_same_document(const Case& a, std::size_t da, const Case& b, std::size_t db) {
  for (std::size_t h = 0; h < a.shape.value_heads; ++h) expect_same_head(a, da, b, db, h);
}

TEST(GatedDeltaRule, ADocumentHasTheSameBitsAloneAndPacked) {
  for_variants([&](const DeltaRuleVariant& variant) {
    Case packed(kMixed, variant.dtype, 5);
    packed.run(variant);
    for (std::size_t d = 0; d < kMixed.lengths.size(); ++d) {
      Shape s = kMixed;
      s.lengths = {kMixed.lengths[d]};
      Case one(s, variant.dtype, 0);
      const std::size_t begin = packed.offsets[d], count = kMixed.lengths[d];
      const auto copy = [&](Numbers& to, const Numbers& from) {
        to.copy_rows(0, from, begin, count);
      };
      copy(one.q, packed.q);
      copy(one.k, packed.k);
      copy(one.v, packed.v);
      copy(one.g, packed.g);
      copy(one.beta, packed.beta);
      copy(one.dout, packed.dout);
      std::copy_n(packed.state.data() + packed.state_at(d, 0), one.state.size(), one.state.data());
      std::copy_n(packed.dfinal.data() + packed.state_at(d, 0), one.dfinal.size(),
                  one.dfinal.data());
      one.run(variant);
      expect_same_document(packed, d, one, 0);
    }
  });
}

TEST(GatedDeltaRule, ThreadsDoNotChangeABit) {
  ThreadPool pool(3);
  const auto on_pool = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  for_variants([&](const DeltaRuleVariant& variant) {
    Case one(kMixed, variant.dtype, 6), many(kMixed, variant.dtype, 6);
    one.run(variant);
    many.run(variant, on_pool);
    for (std::size_t d = 0; d < kMixed.lengths.size(); ++d) expect_same_document(one, d, many, d);
  });
}

TEST(GatedDeltaRule, NanStaysInItsDocumentAndHead) {
  for_variants([&](const DeltaRuleVariant& variant) {
    Case clean(kMixed, variant.dtype, 7), dirty(kMixed, variant.dtype, 7);
    const std::size_t begin = dirty.offsets[2];
    for (std::size_t t = begin; t < begin + 33; ++t) {
      dirty.q.put(dirty.q.at(t, 0, 0), std::nanf(""));
      dirty.k.put(dirty.k.at(t, 0, 3), std::nanf(""));
      dirty.v.put(dirty.v.at(t, 1, 1), std::numeric_limits<float>::infinity());
      dirty.g.put(dirty.g.at(t, 1, 0), std::nanf(""));
      dirty.dout.put(dirty.dout.at(t, 0, 0), std::nanf(""));
    }
    clean.run(variant);
    dirty.run(variant);
    EXPECT_TRUE(std::isnan(dirty.out(begin + 32, 0, 0)));
    for (const std::size_t d : {0, 1, 3, 4, 5}) expect_same_document(clean, d, dirty, d);
    for (const std::size_t h : {2, 3}) expect_same_head(clean, 2, dirty, 2, h);
  });
}

// A document's last tokens do not reach its first: with NaN from token 64 on, the chunk before is
// as it was.
TEST(GatedDeltaRule, NanDoesNotReachEarlierChunks) {
  for_variants([&](const DeltaRuleVariant& variant) {
    Case clean({.lengths = {90}}, variant.dtype, 8), dirty({.lengths = {90}}, variant.dtype, 8);
    for (std::size_t t = 64; t < 90; ++t) dirty.k.put(dirty.k.at(t, 0, 0), std::nanf(""));
    clean.run(variant);
    dirty.run(variant);
    EXPECT_EQ(clean.out.rows(0, 64, 0), dirty.out.rows(0, 64, 0));
    EXPECT_TRUE(std::isnan(dirty.out(80, 0, 0)));
  });
}

TEST(GatedDeltaRule, RowsOutsideEveryDocumentAreZero) {
  for_variants([&](const DeltaRuleVariant& variant) {
    Case c({.lengths = {5, 0, 0}, .gap = 4}, variant.dtype, 9);
    c.run(variant);
    for (const Numbers* n : {&c.out, &c.dq, &c.dk, &c.dv, &c.dg, &c.dbeta})
      for (const std::size_t t : {0, 3, 9, 12})
        for (const double x : n->row(t, n->heads - 1)) EXPECT_EQ(0, x);
  });
}

// A document of more chunks than the backward keeps states for is cut into segments: 128 heads of
// 2 KiB leave room for 24.
TEST(GatedDeltaRule, LongDocumentsAreScannedInSegments) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const DeltaRuleVariant& variant = *best_row(gated_delta_rule_variants(), best_isa(), dtype);
    const Shape shape = {
        .lengths = {64 * 30 + 5}, .value_heads = 128, .key_size = 8, .value_size = 8};
    Case c(shape, dtype, 10);
    c.run(variant);
    expect_reference(c, reference(c), variant.isa);
  }
}

TEST(GatedDeltaRule, ScratchOfTheBackward) {
  Case c({.lengths = {1}, .key_heads = 16, .value_heads = 32, .key_size = 128, .value_size = 128},
         DType::kBFloat16, 11);
  for_variants([&](const DeltaRuleVariant& variant) {
    const DeltaRuleProblem p = c.problem();
    EXPECT_LE(gated_delta_rule_backward_scratch(variant, p, 2048), std::size_t{8} << 20);
    EXPECT_LE(gated_delta_rule_backward_scratch(variant, p, 8192), std::size_t{8} << 20);
  });
}

TEST(GatedDeltaRule, RejectsWhatContradictsItself) {
  const auto fails = [&](auto change) {
    Case c({.lengths = {3, 4}}, DType::kFloat32, 12);
    DeltaRuleProblem p = c.problem();
    change(c, p);
    EXPECT_THROW(gated_delta_rule({p, c.q.view(), c.k.view(), c.v.view(), c.g.gates(),
                                   c.beta.gates(), c.out.out(), nullptr},
                                  serial_for),
                 Error);
  };
  fails([](Case& c, DeltaRuleProblem&) { c.offsets[2] = 8; });  // beyond the tokens
  fails([](Case& c, DeltaRuleProblem&) { c.offsets[1] = 8; });  // descends
  fails([](Case& c, DeltaRuleProblem&) { c.offsets[0] = -1; });
  fails([](Case&, DeltaRuleProblem& p) { p.value_heads = 0; });
  fails([](Case&, DeltaRuleProblem& p) { p.key_heads = 3; });
  fails([](Case&, DeltaRuleProblem& p) { p.key_size = 257; });
  fails([](Case&, DeltaRuleProblem& p) { p.value_size = 0; });
  fails([](Case&, DeltaRuleProblem& p) { p.scale = std::nanf(""); });
}

}  // namespace
}  // namespace monograph
