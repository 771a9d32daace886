// Panels decoded by the kernels of dequantize, on the stream of a call.
#pragma once

#include "cuda/device.h"
#include "cuda/panels.h"

namespace monograph::ops {

PanelBackend panels_on(const CudaDevice& device);

}  // namespace monograph::ops
