// The directions of a change that is none of low rank: of DoRA, diag(f) (W + B A) - W.
#pragma once

#include <cstddef>

#include "monograph/cpu/parallel.h"
#include "monograph/merge/directions.h"
#include "monograph/merge/panels.h"

namespace monograph {

// V and S of the whole change D of one matrix, within the span of the rows of A and of as many
// random combinations of the rows of D, at most 64: those of the largest singular values are in it.
// Reads the matrix twice. The same bits for any number of threads.
Directions total_change_directions(const MergedPanels& panels, std::size_t matrix,
                                   ParallelFor parallel_for);

}  // namespace monograph
