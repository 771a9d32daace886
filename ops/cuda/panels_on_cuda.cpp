#include "cuda/panels_on_cuda.h"

#include "cuda/launch.h"
#include "monograph/formats/slice.h"

namespace monograph::ops {
namespace {

void decode_on_cuda(const PackedView& weight, const Region& region, DType dtype, void* out,
                    void* stream) {
  const PackedView rows = slice_rows(weight, region.row, region.rows);
  if (region.cols == weight.cols)
    gpu::launch_dequantize(rows, dtype, out, stream);
  else
    gpu::launch_dequantize_columns(rows, region.col, region.cols, dtype, out, stream);
}

}  // namespace

PanelBackend panels_on(const CudaDevice& device) { return {decode_on_cuda, device.stream()}; }

}  // namespace monograph::ops
