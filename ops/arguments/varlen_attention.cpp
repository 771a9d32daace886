#include "arguments/varlen_attention.h"

#include "arguments/documents.h"

namespace monograph::ops {
namespace {

void check_three(const char* op, const char* what, const Tensor& tensor) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.dim() == 3, op, ": ", what, " has ", tensor.dim(),
                  " dimensions, wanted [tokens, heads, size]");
}

}  // namespace

HeadsArgument heads_of(const char* op, const char* what, const Tensor& tensor, DType dtype) {
  STD_TORCH_CHECK(dtype_of(tensor.scalar_type(), op, what) == dtype, op, ": ", what, " is ",
                  name_of(tensor.scalar_type()), ", wanted ", name_of(dtype), " as q");
  const bool usable = tensor.stride(2) == 1 || tensor.size(2) <= 1;
  HeadsArgument argument = {usable ? tensor : torch::stable::contiguous(tensor), {}};
  argument.view = {argument.owner.const_data_ptr(), argument.owner.stride(0),
                   argument.owner.stride(1)};
  return argument;
}

MutableHeadsView mutable_heads(const Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

AttentionProblem check_problem(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& cu_q, const Tensor& cu_k,
                               const std::optional<Tensor>& key_lengths,
                               const std::optional<Tensor>& sinks, bool causal, std::int64_t window,
                               double scale, double softcap) {
  check_three(op, "q", q);
  check_three(op, "k", k);
  check_three(op, "v", v);
  STD_TORCH_CHECK(k.size(0) == v.size(0) && k.size(1) == v.size(1), op, ": k has ", k.size(0),
                  " tokens of ", k.size(1), " heads, v has ", v.size(0), " of ", v.size(1));
  STD_TORCH_CHECK(q.size(2) == k.size(2), op, ": q has heads of ", q.size(2), ", k of ", k.size(2));
  STD_TORCH_CHECK(q.size(1) > 0 && k.size(1) > 0 && q.size(1) % k.size(1) == 0, op, ": ", q.size(1),
                  " query heads are no multiple of ", k.size(1), " key heads");
  STD_TORCH_CHECK(window >= 0, op, ": window is ", window, ", wanted 0 for none or more");
  STD_TORCH_CHECK(scale >= 0, op, ": scale is ", scale, ", wanted 0 or more");
  STD_TORCH_CHECK(softcap >= 0, op, ": softcap is ", softcap, ", wanted 0 for none or more");
  const DocumentsArgument documents = documents_of(op, "cu_q", cu_q);
  AttentionProblem problem = {};
  problem.dtype = dtype_of(q.scalar_type(), op, "q");
  problem.query_tokens = static_cast<std::size_t>(q.size(0));
  problem.key_tokens = static_cast<std::size_t>(k.size(0));
  problem.heads = static_cast<std::size_t>(q.size(1));
  problem.kv_heads = static_cast<std::size_t>(k.size(1));
  problem.key_size = static_cast<std::size_t>(q.size(2));
  problem.value_size = static_cast<std::size_t>(v.size(2));
  problem.causal = causal;
  problem.window = window;
  problem.scale = float32_of(op, "scale", scale);
  problem.softcap = float32_of(op, "softcap", softcap);
  if (sinks) {
    STD_TORCH_CHECK(sinks->scalar_type() == ScalarType::Float && sinks->dim() == 1 &&
                        sinks->is_contiguous() && sinks->numel() == q.size(1),
                    op, ": sinks has ", sinks->numel(), " values of ",
                    name_of(sinks->scalar_type()), ", wanted ", q.size(1),
                    " contiguous float32 values");
    problem.sinks = static_cast<const float*>(sinks->const_data_ptr());
  }
  const auto count = static_cast<std::int64_t>(documents.count);
  problem.documents.count = documents.count;
  problem.documents.query_offsets = documents.offsets;
  problem.documents.key_offsets = offsets_of(op, "cu_k", cu_k, count + 1);
  if (key_lengths)
    problem.documents.key_lengths = offsets_of(op, "key_lengths", *key_lengths, count);
  return problem;
}

void check_results(const char* op, const Tensor& q, const Tensor& v, const Tensor& out,
                   const Tensor& dout, const Tensor& lse) {
  const auto check = [&](const char* what, const Tensor& t) {
    check_three(op, what, t);
    STD_TORCH_CHECK(t.size(0) == q.size(0) && t.size(1) == q.size(1) && t.size(2) == v.size(2), op,
                    ": ", what, " has shape [", t.size(0), ", ", t.size(1), ", ", t.size(2),
                    "], wanted [", q.size(0), ", ", q.size(1), ", ", v.size(2), "]");
  };
  check("out", out);
  check("dout", dout);
  check_given(op, "lse", lse);
  STD_TORCH_CHECK(lse.scalar_type() == ScalarType::Float && lse.is_contiguous() && lse.dim() == 2 &&
                      lse.size(0) == q.size(1) && lse.size(1) == q.size(0),
                  op, ": lse has ", lse.dim(), " dimensions and ", lse.numel(), " elements of ",
                  name_of(lse.scalar_type()), ", wanted contiguous float32 [", q.size(1), ", ",
                  q.size(0), "] as varlen_attention returned it");
}

}  // namespace monograph::ops
