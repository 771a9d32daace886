// The running softmax of one row, for the vector variants.
#pragma once

#include "monograph/kernels/varlen_attention/softmax.h"
#include "monograph/kernels/varlen_attention/unit.h"
#include "monograph/simd/lanes.h"

namespace monograph {

// One row of scores to probabilities; `out` is the row's sum so far. Keys outside [begin, end) of
// the block count for nothing.
template <class V>
void softmax_row(const AttentionProblem& p, float* scores, std::int64_t keys, std::int64_t begin,
                 std::int64_t end, float& peak, float& sum, float* out, std::int64_t width) {
  using L = Lanes<V>;
  const bool cap = p.softcap > 0;
  const typename L::F32 inner = L::set(cap ? p.scale / p.softcap : p.scale * kLog2E);
  const typename L::F32 outer = L::set(p.softcap * kLog2E);
  for (std::int64_t j = 0; j < keys; j += L::kLanes) {
    const typename L::F32 x = L::mul(L::load(scores + j), inner);
    L::store(scores + j, cap ? L::mul(tanh_of<V>(x), outer) : x);
  }
  for (std::int64_t j = 0; j < begin; ++j) scores[j] = -__builtin_inff();
  for (std::int64_t j = end; j < keys; ++j) scores[j] = -__builtin_inff();
  typename L::F32 largest = L::load(scores);
  for (std::int64_t j = L::kLanes; j < keys; j += L::kLanes)
    largest = L::max(largest, L::load(scores + j));
  const float top = L::reduce_max(largest);
  if (top > peak + kSlack) {
    const typename L::F32 shrink = exp2_of<V>(L::set(peak - top));
    for (std::int64_t c = 0; c < width; c += L::kLanes)
      L::store(out + c, L::mul(L::load(out + c), shrink));
    float ratio[L::kLanes];
    L::store(ratio, shrink);
    sum *= ratio[0];
    peak = top;
  }
  const typename L::F32 base = L::set(peak);
  typename L::F32 lanes = L::set(0.f);
  for (std::int64_t j = 0; j < keys; j += L::kLanes) {
    const typename L::F32 e = exp2_of<V>(L::sub(L::load(scores + j), base));
    lanes = L::add(lanes, e);
    L::store(scores + j, e);
  }
  sum += L::reduce_add(lanes);
}

}  // namespace monograph
