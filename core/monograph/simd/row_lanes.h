// What elementwise kernels need beyond Lanes. RowLanes<V> is specialised beside the intrinsics, in
// row_lanes_<isa>.h.
#pragma once

#include "monograph/simd/lanes.h"

namespace monograph {

// All of Lanes, and: fused (a * b + c with one rounding, on every instruction set), round_as (what
// a store and a load of a storage type would give), store_rounded (a store of what round_as gave),
// store_two (to where load_two takes from), ordered_as (two vectors of numbers as they stand in
// memory, into the order in which load_two gives a storage type), sqrt, and sums in fp64: Doubles
// (a lane each), add_squares (exact before the sum), store_doubles.
template <class V>
struct RowLanes;

}  // namespace monograph
