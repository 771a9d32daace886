// Sums over tokens of outer products, an expert at a time: the gradients of LoRA factors and
// biases. A unit of work is some columns, so no sum knows the number of threads.
#pragma once

#include "monograph/kernels/experts/layer.h"

namespace monograph {

// small[place, j]: `rank` numbers of each place in fp32, or those of each active expert as tiles.
struct GramRows {
  std::vector<float> small;
  std::size_t rank;
  const ExpertsTiles* kernels = nullptr;
  Buffer tiles = {};
  std::vector<std::size_t> offsets = {};
};
// u [places, rank] in the type of x; each row times its factor, where there are factors.
GramRows gram_rows(const ExpertsLayer& layer, const Buffer& u, std::size_t rank,
                   const float* factors);

// out [E rank, cols], row e * rank + j, in `dtype`: as A and, of rank 1, as a bias.
void gram_to_rows(const ExpertsLayer& layer, const GramRows& small, const ExpertsRows& large,
                  void* out, DType dtype);
// out [cols, rank E], column j * E + e: as B.
void gram_to_columns(const ExpertsLayer& layer, const GramRows& small, const ExpertsRows& large,
                     void* out, DType dtype);

}  // namespace monograph
