// Which type each matrix of a model has under q4_k_m, q5_k_m and q6_k: as llama-quantize chooses
// without an importance matrix.
#pragma once

#include <cstdint>
#include <string_view>

#include "monograph/gguf/model_config.h"
#include "monograph/gguf/tensor_type.h"

namespace monograph::gguf {

constexpr bool is_mixture(TensorType type) {
  return type == TensorType::kQ4K || type == TensorType::kQ5K || type == TensorType::kQ6K;
}

// The router of a mixture, which llama.cpp never quantises.
constexpr bool is_router(std::string_view name) { return name.ends_with(".ffn_gate_inp.weight"); }
// The matrices of all experts of a layer.
constexpr bool is_of_experts(std::string_view name) { return name.ends_with("_exps.weight"); }

// The type of the matrix that llama.cpp calls `name`, with rows of `cols` elements:
//   output, or token_embd where the head is tied   q6_k
//   attn_v and ffn_down of q4_k_m and q5_k_m       q6_k in the first eighth of the layers, the
//   last, and every
//                                                  third between them
//   attn_v of q4_k_m, the model having 80 layers   q5_k in the other layers, as eight heads share
//   it
//     and fewer heads of keys than of queries
//   attn_qkv of q4_k_m; of q5_k_m                  q5_k; q6_k
//   attn_v and attn_k of a mixture of 8 experts    q8_0, under every one of the three
//   attn_output of it under q4_k_m                 q5_k
//   ffn_down_exps                                  as ffn_down
//   ffn_gate_inp, the router                       f32
//   others                                         `type`
// Rows that are no multiple of 256 have q5_0, q5_1 and q8_0 for q4_k, q5_k and q6_k; f16 where they
// are no multiple of 32 either.
TensorType mixed_type(const ModelConfig& config, TensorType type, std::string_view name,
                      std::uint64_t cols);

}  // namespace monograph::gguf
