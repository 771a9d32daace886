// The words and the elements, once for every SIMD vocabulary.
#pragma once

#include "monograph/base/float_types.h"
#include "monograph/kernels/seeded_dropout/philox.h"
#include "monograph/kernels/seeded_dropout/seeded_dropout.h"
#include "monograph/simd/row_walk.h"
#include "monograph/simd/unrolled.h"
#include "monograph/simd/words.h"

namespace monograph {

template <class V>
struct MaskWords {
  using W = Words<V>;
  using Word = typename W::Word;
  static constexpr std::size_t kBlock = 4 * W::kLanes;

  // philox() of philox.h on the counters four, four + 1, ...: kBlock words of elements 4 * four on.
  [[gnu::always_inline]] static void write(std::uint64_t four, std::uint64_t key,
                                           std::uint32_t* out) {
    const Word counter = W::counted(four), zero = W::set(0);
    Word c[4] = {counter, W::upper(counter), zero, zero};
    std::uint32_t low = static_cast<std::uint32_t>(key);
    std::uint32_t high = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      const Word first = W::mul(c[0], W::set(0xD2511F53));
      const Word second = W::mul(c[2], W::set(0xCD9E8D57));
      c[0] = W::exclusive_or(W::exclusive_or(W::upper(second), c[1]), W::set(low));
      c[1] = second;
      c[2] = W::exclusive_or(W::exclusive_or(W::upper(first), c[3]), W::set(high));
      c[3] = first;
      low += 0x9E3779B9;
      high += 0xBB67AE85;
    }
    W::store_fours(out, c);
  }
};

template <class V, class T>
void drop_elements(const DropoutProblem& problem, std::size_t begin, std::size_t end) {
  using L = RowLanes<V>;
  using M = MaskWords<V>;
  using Walk = RowWalk<V>;
  constexpr std::size_t kBlock = M::kBlock;
  const T* const x = static_cast<const T*>(problem.x);
  T* const out = static_cast<T*>(problem.out);
  const std::uint64_t key = mask_key(problem.seed, problem.stream);
  // The largest word that is kept; next to probability 1 there is none.
  const std::uint64_t below = keep_below(problem.probability);
  const auto last = static_cast<std::uint32_t>((below == 0 ? 1 : below) - 1);
  const float one = below == 0 ? 0.f : 1.f;
  const typename L::F32 keep = L::set(static_cast<float>(1.0 - problem.probability));
  std::uint32_t words[kBlock];
  float factors[kBlock];
  while (begin < end) {
    const std::uint64_t place = problem.first + begin;
    const std::size_t skipped = static_cast<std::size_t>(place % 4);
    M::write(place / 4, key, words);
    for (std::size_t i = 0; i < kBlock; ++i) factors[i] = words[i] <= last ? one : 0.f;
    const std::size_t room = kBlock - skipped;
    const std::size_t size = end - begin < room ? end - begin : room;
    Walk::each_alone(
        size, [&](std::size_t i, std::size_t count) __attribute__((always_inline)) {
          const typename L::F32 kept =
              L::mul(Walk::load(x + begin + i, count), Walk::load(factors + skipped + i, count));
          Walk::store(out + begin + i, L::div(kept, keep), count);
        });
    begin += size;
  }
}

template <class V>
DropoutFn* seeded_dropout_variant(DType dtype) {
  return with_type(
      dtype, []<class T>() __attribute__((always_inline)) { return &drop_elements<V, T>; });
}

}  // namespace monograph
