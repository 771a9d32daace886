// The quantised linear layer and its gradient, straight from packed weights:
//   linear:     y[M,N]  = gain[N] * (x[M,K] * W[N,K]^T + sum_i u_i[M,r_i] * B_i[N,r_i]^T) + bias[N]
//   linear_dx:  dx[M,K] = sum_i g_i[M,n_i] * W_i[n_i,K]      e.g. {dy, W} and, for LoRA, {du, A}
// The low-rank products continue the accumulator of the large one: no second pass over the output.
//
// A weight is what `dequantize` gives, rounded to the type of the activations. Sums are fp32; the
// result is rounded once, to the type of the activations, to nearest even.
//
// The order of summation is fixed for each instruction set: it depends on the reduction index
// alone, never on M, N, threads or caches, so a row of the result has the same bits in every batch.
//   amx, bf16:  one chain over tiles of 32, inside a tile the order of TDPBF16PS, which flushes
//               subnormals, as the rounding of its results does.
//   otherwise:  fp32 multiply-add. Forward: chunks of 32 vectors, lanes apart, then a tree over the
//               lanes and a chain over the chunks. dx: chains of 16 terms, sixteen of them summed,
//               then a chain over these.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "monograph/cpu/parallel.h"
#include "monograph/cpu/variant.h"
#include "monograph/kernels/linear/kernels.h"
#include "monograph/kernels/linear/products.h"

namespace monograph {

struct LinearOutput {
  LinearWeight weight;                   // [N, K]
  std::span<const LinearTerm> low_rank;  // u [M, r] and B [N, r] each; may be empty
  const void* bias = nullptr;            // [N] in the call's type, or none
  MutableMatrix y;                       // [M, N]
  const float* gain = nullptr;           // [N], on the fp32 sums before they are rounded, or none
};

// Several weights that share x (q, k and v; gate and up) are one call: x is then packed once for
// all of them where it fits half the second-level cache. Scratch memory is at most 4 MiB of the
// calling thread plus 2 MiB for each thread, whatever the shape, and stays with the threads. No
// output may overlap an input.
void linear(DType dtype, const Matrix& x, std::span<const LinearOutput> outputs,
            ParallelFor parallel_for);

void linear_dx(DType dtype, std::span<const LinearTerm> terms, const MutableMatrix& dx,
               ParallelFor parallel_for);

// All products of a list at once, in two parallel regions for as many of them as the scratch memory
// holds: the experts of a layer, each on the rows that chose it. Each is what it would be alone, to
// the bit. Scratch memory as above.
void linear_products(DType dtype, Pass pass, std::span<const LinearProduct> products,
                     ParallelFor parallel_for);

// One product with ranges of rows, any number of them, some of which may be empty: adapters beside
// one weight, which is decoded for all of them. The rows of a range have the bits of a product of
// these rows alone with the terms, bias and gain of both. Scratch memory as above.
void linear_ranges(DType dtype, Pass pass, const LinearProduct& product, ParallelFor parallel_for);

struct ByPass {
  DType dtype;
  Pass pass;
  bool operator==(const ByPass&) const = default;
};
using LinearVariant = Variant<const LinearKernels, ByPass>;

// Every variant, best instruction set first.
const std::vector<LinearVariant>& linear_variants();

// The operations on given kernels: what those above call once they have chosen.
void linear_with(const LinearKernels& kernels, DType dtype, const Matrix& x,
                 std::span<const LinearOutput> outputs, ParallelFor parallel_for);
void linear_dx_with(const LinearKernels& kernels, DType dtype, std::span<const LinearTerm> terms,
                    const MutableMatrix& dx, ParallelFor parallel_for);
void linear_products_with(const LinearKernels& kernels, DType dtype,
                          std::span<const LinearProduct> products, ParallelFor parallel_for);
void linear_ranges_with(const LinearKernels& kernels, DType dtype, const LinearProduct& product,
                        ParallelFor parallel_for);

}  // namespace monograph
