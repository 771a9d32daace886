// Which tensors a GGUF file of a model has, and no others.
#pragma once

#include <cstdint>

#include "monograph/gguf/file_reader.h"

namespace monograph::gguf {

struct ModelSizes {
  std::uint64_t vocabulary, hidden, layers, heads, kv_heads, head_dim;
  std::uint64_t intermediate;                          // of dense layers
  std::uint64_t experts = 0, expert_intermediate = 0;  // 0 experts: dense layers
  bool query_bias = false;                             // of q, k and v
  bool output_bias = false, mlp_bias = false;
  bool head_norms = false;    // of queries and keys
  bool norms_behind = false;  // Gemma's, behind attention and MLP
  bool fused = false;         // Phi's: q, k and v are one matrix, gate and up another
  bool gpt_oss = false;       // sinks, biases of router and experts, a norm of another name
};

// Throws Error for a tensor that is missing, has another shape, or is one too many: transformers
// would fill it with random numbers, or leave it out. `output.weight` may be missing (tied), and
// `rope_freqs.weight` is for the caller to read.
void check_tensors(const FileReader& file, const ModelSizes& sizes);

}  // namespace monograph::gguf
