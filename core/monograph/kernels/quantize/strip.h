// Blocks of one row taken together: their scales are chosen in the lanes of a vector, and their
// elements rounded without a look at the block they belong to. Strip<F, V, T> is specialised where
// there is a faster way than block by block; see strip_avx512.h.
#pragma once

#include <cstddef>

namespace monograph {

// kBlocks: how many it takes, 0 for none. quantize(job, block, context) does them, all of one
// matrix; false, with nothing to be used of the output, if an element is not finite.
template <class F, class V, class T>
struct Strip {
  static constexpr std::size_t kBlocks = 0;
};

}  // namespace monograph
