// One row of logits, once for every SIMD vocabulary.
#pragma once

#include <type_traits>

#include "monograph/base/float_types.h"
#include "monograph/kernels/linear_cross_entropy/kernels.h"
#include "monograph/simd/lanes.h"

namespace monograph {

// Terms summed in fp32 before their sum joins the fp64 total.
inline constexpr std::size_t kSumBlock = 1024;

// Logits to z, and the factor dz/dlogit.
template <class V, bool kCap>
struct LogitsToZ {
  using L = Lanes<V>;
  using F32 = typename L::F32;

  explicit LogitsToZ(const LogitsMap& map)
      : scale(L::set(map.scale)),
        inner(L::set(kCap ? map.scale / map.softcap : 0.f)),
        outer(L::set(map.softcap)) {}

  [[gnu::always_inline]] F32 operator()(F32 logit) const {
    if constexpr (kCap) return L::mul(tanh_of<V>(L::mul(logit, inner)), outer);
    return L::mul(logit, scale);
  }
  [[gnu::always_inline]] F32 with_slope(F32 logit, F32& slope) const {
    if constexpr (kCap) {
      const F32 t = tanh_of<V>(L::mul(logit, inner));
      slope = L::mul(scale, L::sub(L::set(1.f), L::mul(t, t)));
      return L::mul(t, outer);
    }
    slope = scale;
    return L::mul(logit, scale);
  }

  F32 scale, inner, outer;
};

template <class V, class T, bool kCap>
struct CrossEntropyRow {
  using L = Lanes<V>;
  using F32 = typename L::F32;
  static constexpr std::size_t kLanes = L::kLanes;

  const LogitsToZ<V, kCap> z_of;
  T* const logits;
  const std::size_t count, whole;  // of them in whole vectors

  explicit CrossEntropyRow(const LogitsRow& row)
      : z_of(row.map),
        logits(static_cast<T*>(row.logits)),
        count(row.count),
        whole(row.count / kLanes * kLanes) {}

  [[gnu::always_inline]] F32 load(std::size_t i) const { return L::load_as(logits + i); }

  // The elements behind the whole vectors and then zeros.
  [[gnu::always_inline]] F32 load_tail() const {
    float buffer[kLanes] = {};
    for (std::size_t i = whole; i < count; ++i) buffer[i - whole] = to_float(logits[i]);
    return L::load(buffer);
  }
  // z of the tail, -inf behind it.
  [[gnu::always_inline]] F32 tail_z() const {
    float buffer[kLanes];
    L::store(buffer, z_of(load_tail()));
    for (std::size_t i = count - whole; i < kLanes; ++i) buffer[i] = -__builtin_inff();
    return L::load(buffer);
  }
  // A NaN anywhere in `sum` makes it NaN, wherever the largest came from.
  float peak() const {
    F32 largest = tail_z();
    for (std::size_t i = 0; i < whole; i += kLanes) largest = L::max(z_of(load(i)), largest);
    return L::reduce_max(largest);
  }
  [[gnu::always_inline]] static F32 exp_of(F32 z, F32 base) {
    return exp2_of<V>(L::mul(L::sub(z, base), L::set(kLog2E)));
  }
  double sum(float peak) const {
    const F32 base = L::set(peak);
    double total = L::reduce_add(exp_of(tail_z(), base));
    for (std::size_t begin = 0; begin < whole; begin += kSumBlock) {
      const std::size_t end = whole - begin < kSumBlock ? whole : begin + kSumBlock;
      F32 lanes = L::set(0.f);
      for (std::size_t i = begin; i < end; i += kLanes)
        lanes = L::add(lanes, exp_of(z_of(load(i)), base));
      total += static_cast<double>(L::reduce_add(lanes));
    }
    return total;
  }

  // z, the lanes behind the end as `end`.
  template <class Body>
  [[gnu::always_inline]] void each_block(std::size_t limit, F32 end, Body body) const {
    const std::size_t full = limit / kLanes * kLanes;
    for (std::size_t begin = 0; begin < full; begin += kSumBlock) {
      const std::size_t stop = full - begin < kSumBlock ? full : begin + kSumBlock;
      body(
          begin, stop, [&](std::size_t i) __attribute__((always_inline)) { return z_of(load(i)); });
    }
    if (full == limit) return;
    float buffer[kLanes], ends[kLanes];
    for (std::size_t i = full; i < limit; ++i) buffer[i - full] = to_float(logits[i]);
    for (std::size_t i = limit - full; i < kLanes; ++i) buffer[i] = 0.f;
    L::store(buffer, z_of(L::load(buffer)));
    L::store(ends, end);
    for (std::size_t i = limit - full; i < kLanes; ++i) buffer[i] = ends[i];
    const F32 last = L::load(buffer);
    body(
        full, full + kLanes, [&](std::size_t) __attribute__((always_inline)) { return last; });
  }
  float largest(std::size_t limit) const {
    F32 found = L::set(-__builtin_inff());
    each_block(
        limit,
        found, [&](std::size_t begin, std::size_t end, auto z) __attribute__((always_inline)) {
          for (std::size_t i = begin; i < end; i += kLanes) found = L::max(z(i), found);
        });
    return L::reduce_max(found);
  }
  void add_statistics(float peak, RowStatistics& s) const {
    const F32 base = L::set(peak);
    // exp2 of the least it takes is 0 where a term of a distribution is.
    const F32 least = L::set(-200.f / kLog2E);
    each_block(
        count, L::set(-__builtin_inff()),
        [&](std::size_t begin, std::size_t end, auto z) __attribute__((always_inline)) {
          F32 weighted = L::set(0.f), squares = weighted;
          for (std::size_t i = begin; i < end; i += kLanes) {
            const F32 away = L::max(L::sub(z(i), base), least);
            const F32 e = exp2_of<V>(L::mul(away, L::set(kLog2E)));
            weighted = L::fma(e, away, weighted);
            squares = L::fma(e, e, squares);
          }
          s.weighted += static_cast<double>(L::reduce_add(weighted));
          s.squares += static_cast<double>(L::reduce_add(squares));
        });
    each_block(
        count, L::set(0.f),
        [&](std::size_t begin, std::size_t end, auto z) __attribute__((always_inline)) {
          F32 total = L::set(0.f);
          for (std::size_t i = begin; i < end; i += kLanes) total = L::add(total, z(i));
          s.total += static_cast<double>(L::reduce_add(total));
        });
  }

  struct EntropyDifferential {
    F32 lse, entropy, factor;

    [[gnu::always_inline]] F32 operator()(const LogitsToZ<V, kCap>& to_z, F32 logit) const {
      F32 slope;
      const F32 log_p = L::sub(to_z.with_slope(logit, slope), lse);
      const F32 p = exp2_of<V>(L::mul(log_p, L::set(kLog2E)));
      const F32 bounded = L::max(log_p, L::set(-200.f / kLog2E));  // no 0 * infinity
      return L::mul(L::mul(L::mul(p, L::add(bounded, entropy)), factor), slope);
    }
  };

  struct Differential {
    F32 base, factor, subtract;

    [[gnu::always_inline]] F32 operator()(const LogitsToZ<V, kCap>& to_z, F32 logit) const {
      F32 slope;
      const F32 z = to_z.with_slope(logit, slope);
      return L::mul(L::sub(L::mul(exp_of(z, base), factor), subtract), slope);
    }
  };
  template <class D>
  void differentiate(const D& d) const {
    for (std::size_t i = 0; i < whole; i += kLanes) L::store_as(logits + i, d(z_of, load(i)));
    float buffer[kLanes];
    L::store(buffer, d(z_of, load_tail()));
    for (std::size_t i = whole; i < count; ++i) logits[i] = from_float<T>(buffer[i - whole]);
  }
  // The first lane of one element.
  [[gnu::always_inline]] float one(F32 x) const {
    float buffer[kLanes];
    L::store(buffer, x);
    return buffer[0];
  }
};

// body on the row as it is: with or without the cap.
template <class V, class T, class Body>
[[gnu::always_inline]] inline auto with_row(const LogitsRow& row, Body&& body) {
  if (row.map.softcap > 0) return body(CrossEntropyRow<V, T, true>(row));
  return body(CrossEntropyRow<V, T, false>(row));
}

template <class V, class T>
RowSums row_sums(const LogitsRow& row) {
  return with_row<V, T>(
      row, [&](const auto& r) __attribute__((always_inline)) {
        using L = Lanes<V>;
        RowSums sums = {r.peak(), 0, 0};
        sums.sum = r.sum(sums.peak);
        if (row.label != kNoLabel)
          sums.label = r.one(r.z_of(L::set(to_float(r.logits[row.label]))));
        return sums;
      });
}

template <class V, class T>
void row_gradient(const LogitsRow& row, float base, float inverse, float factor) {
  with_row<V, T>(
      row, [&](const auto& r) __attribute__((always_inline)) {
        using L = Lanes<V>;
        using Row = std::remove_cvref_t<decltype(r)>;
        typename Row::Differential d = {L::set(base), L::set(inverse * factor), L::set(0.f)};
        const float label = row.label == kNoLabel ? 0.f : to_float(r.logits[row.label]);
        r.differentiate(d);
        if (row.label == kNoLabel) return;
        d.subtract = L::set(factor);
        r.logits[row.label] = from_float<T>(r.one(d(r.z_of, L::set(label))));
      });
}

template <class V, class T>
RowStatistics row_statistics(const LogitsRow& row, float peak) {
  return with_row<V, T>(
      row, [&](const auto& r) __attribute__((always_inline)) {
        RowStatistics s = {0, 0, 0, r.largest(row.label == kNoLabel ? 0 : row.label)};
        r.add_statistics(peak, s);
        return s;
      });
}

template <class V, class T>
void row_entropy_gradient(const LogitsRow& row, float lse, float entropy, float factor) {
  with_row<V, T>(
      row, [&](const auto& r) __attribute__((always_inline)) {
        using L = Lanes<V>;
        using Row = std::remove_cvref_t<decltype(r)>;
        r.differentiate(
            typename Row::EntropyDifferential{L::set(lse), L::set(entropy), L::set(-factor)});
      });
}

template <class V, class T>
inline constexpr CrossEntropyKernels kCrossEntropyKernels = {
    row_sums<V, T>, row_statistics<V, T>, row_gradient<V, T>, row_entropy_gradient<V, T>};

template <class V>
const CrossEntropyKernels* find_cross_entropy(DType dtype) {
  return with_type(
      dtype, []<class T>() __attribute__((always_inline)) { return &kCrossEntropyKernels<V, T>; });
}

}  // namespace monograph
