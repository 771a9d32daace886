// The sum over the micro-batches of a step in the order of monograph.distributed.tree: a binary
// tree over `leaves` leaves. [a, b) is the sum of [a, m) and [m, b) with m = a + (b - a) / 2; leaf
// i is the sum of the micro-batches [i M / leaves, (i + 1) M / leaves), one after the other.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "monograph/train/activations.h"

namespace monograph::train {

// part(index) gives the summand of a micro-batch; they are asked for in order. At most
// 2 + log2(leaves) of them exist at a time.
std::vector<float> tree_sum(std::size_t micro_batches, std::size_t leaves,
                            const std::function<std::vector<float>(std::size_t)>& part,
                            const Workers& workers);

}  // namespace monograph::train
