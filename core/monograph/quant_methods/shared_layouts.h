// Layouts of packed weights that several producers have, whatever their names. Each checks every
// shape and fills in format, shape, block and, if it can be decoded, view; throws Error if the
// parts contradict each other.
#pragma once

#include "monograph/quant_methods/candidate.h"

namespace monograph {

// Two elements a byte along the last dimension, "scale" a byte for 16 of them and "global_scale"
// one for the matrix, or one for each of a stack. ModelOpt stores what multiplies (kNvfp4),
// compressed-tensors what divides (kNvfp4Divide).
void describe_nvfp4(const Candidate& found, Format format);

// Two elements a byte along the last dimension, "scale" a byte for 32 of them.
void describe_mxfp4(const Candidate& found);

// A byte an element, and "scale" for rows of 32 (mxfp8), for blocks as config.json states them,
// else of 128 x 128 (fp8-block), for rows or for the whole weight (fp8; a stack of these is not
// decoded).
void describe_fp8(const Candidate& found);

}  // namespace monograph
