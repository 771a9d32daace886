// Products of many rows with a packed weight: a panel of the weight is decoded into scratch memory
// of torch's allocator, multiplied by the library of the device, and the next one takes its place.
//   panel_product:     out[M, N] = x[M, K] W[N, K]^T + added       panels of rows
//   panel_product_dx:  out[M, K] = g[M, N] W[N, K] + added         panels of columns
// So each sum is one of the library's, rounded once; core/monograph/gpu/panels.h bounds the
// scratch.
//
// Nothing here knows a device: the tests run it on the CPU (ops/cuda/tests/panels_on_cpu.cpp).
#pragma once

#include "cuda/products.h"
#include "monograph/gpu/panels.h"
#include "monograph/kernels/linear/operands.h"

namespace monograph::ops {

// Rows [row, row + rows) by columns [col, col + cols) of a weight.
struct Region {
  std::size_t row, rows, col, cols;
};

// What decodes a region of a packed weight to a dense matrix [rows, cols], on the stream.
struct PanelBackend {
  void (*decode)(const PackedView& weight, const Region& region, DType dtype, void* out,
                 void* stream);
  void* stream = nullptr;
  std::size_t panel_bytes = gpu::kPanelBytes;
};

// `values` holds the elements of a plain weight. One of the type of the activations is multiplied
// as it is; of another type, it is converted panel by panel.
struct PanelWeight {
  const LinearWeight& weight;
  const Tensor& values;
};

void panel_product(const char* op, const PanelBackend& backend, const Tensor& out, const Tensor& x,
                   const PanelWeight& w, const std::optional<Tensor>& added);
void panel_product_dx(const char* op, const PanelBackend& backend, const Tensor& out,
                      const Tensor& g, const PanelWeight& w, const std::optional<Tensor>& added);

}  // namespace monograph::ops
