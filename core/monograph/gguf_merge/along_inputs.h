// Exporting with codes that are rounded along the inputs of layers: the errors of a row are kept
// out of what x has in common.
#pragma once

#include <cstddef>
#include <memory>

#include "monograph/gguf/export.h"
#include "monograph/merge/calibration.h"

namespace monograph::gguf {

// How many matrices of an export are in blocks and have their inputs in the file, and how many not.
struct CalibratedTensors {
  std::size_t known = 0, unknown = 0;
};

// Throws Error for a file with inputs that no weight of the plan has, of another number of inputs,
// and for one that knows none of the matrices in blocks.
CalibratedTensors check_calibration(const ExportPlan& plan, const Calibration& calibration);

// Scales as encode() chooses them, then each row's codes as feedback_rounding.h says; null where
// the plain encoder does: plain floats, and weights that the file does not know.
std::shared_ptr<const RowEncoder> along_inputs(const ExportedTensor& tensor,
                                               const Calibration& calibration);

}  // namespace monograph::gguf
