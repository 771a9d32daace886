// The SIMD vocabularies by name only, so that dispatch code needs no intrinsics.
#pragma once

#include "monograph/cpu/isa.h"

namespace monograph {

namespace simd {
struct Scalar;
struct Avx2;
struct Avx512;
struct Amx;
}  // namespace simd

template <class V>
inline constexpr Isa isa_of = Isa::kScalar;
template <>
inline constexpr Isa isa_of<simd::Avx2> = Isa::kAvx2;
template <>
inline constexpr Isa isa_of<simd::Avx512> = Isa::kAvx512;
template <>
inline constexpr Isa isa_of<simd::Amx> = Isa::kAmx;

// An ordered list of vocabularies, best first.
template <class... Vs>
struct TargetList {};

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
