// The arguments of varlen_attention and its backward, checked and turned into views. The borders of
// documents are data: whoever walks them checks them.
#pragma once

#include <optional>

#include "monograph/kernels/varlen_attention/varlen_attention.h"
#include "stable.h"

namespace monograph::ops {

// [tokens, heads, size], the last dimension contiguous; anything else is copied.
struct HeadsArgument {
  Tensor owner;
  HeadsView view;
};

HeadsArgument heads_of(const char* op, const char* what, const Tensor& tensor, DType dtype);
MutableHeadsView mutable_heads(const Tensor& tensor);

// What forward and backward share.
AttentionProblem check_problem(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& cu_q, const Tensor& cu_k,
                               const std::optional<Tensor>& key_lengths,
                               const std::optional<Tensor>& sinks, bool causal, std::int64_t window,
                               double scale, double softcap);

// What the forward returned, and the gradient of it.
void check_results(const char* op, const Tensor& q, const Tensor& v, const Tensor& out,
                   const Tensor& dout, const Tensor& lse);

}  // namespace monograph::ops
