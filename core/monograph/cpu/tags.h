// The SIMD vocabularies by name only, so that dispatch code needs no intrinsics.
#pragma once

#include <initializer_list>

#include "monograph/cpu/isa.h"

namespace monograph {

namespace simd {
struct Scalar;
struct Scalar8;  // lanes only: eight at a time, see lanes_scalar.h
struct Avx2;
struct Avx512;
struct Amx;
struct Neon;
}  // namespace simd

template <class V>
inline constexpr Isa isa_of = Isa::kScalar;
template <>
inline constexpr Isa isa_of<simd::Avx2> = Isa::kAvx2;
template <>
inline constexpr Isa isa_of<simd::Avx512> = Isa::kAvx512;
template <>
inline constexpr Isa isa_of<simd::Amx> = Isa::kAmx;
template <>
inline constexpr Isa isa_of<simd::Neon> = Isa::kNeon;

constexpr bool best_first(std::initializer_list<Isa> levels) {
  for (const Isa* i = levels.begin(); i != levels.end() && i + 1 != levels.end(); ++i)
    if (i[0] <= i[1] || !same_architecture(i[0], i[1])) return false;
  return true;
}

// The vocabularies of one architecture, best first.
template <class... Vs>
struct TargetList {
  static_assert(best_first({isa_of<Vs>...}));
};

// The vocabularies of one list and then those of another.
template <class A, class B>
struct JoinedLists;
template <class... As, class... Bs>
struct JoinedLists<TargetList<As...>, TargetList<Bs...>> {
  using List = TargetList<As..., Bs...>;
};
template <class A, class B>
using Joined = typename JoinedLists<A, B>::List;

}  // namespace monograph
