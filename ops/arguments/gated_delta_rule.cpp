#include "arguments/gated_delta_rule.h"

#include "arguments/documents.h"

namespace monograph::ops {
namespace {

void check_three(const char* op, const char* what, const Tensor& tensor) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.dim() == 3, op, ": ", what, " has ", tensor.dim(),
                  " dimensions, wanted [tokens, heads, size]");
}

// [tokens, value heads] in float32 or the dtype of q.
GateView gates_of(const char* op, const char* what, const Tensor& tensor, const Tensor& v,
                  DType dtype) {
  check_given(op, what, tensor);
  const DType found = dtype_of(tensor.scalar_type(), op, what);
  STD_TORCH_CHECK(found == dtype || found == DType::kFloat32, op, ": ", what, " is ",
                  name_of(tensor.scalar_type()), ", wanted ", name_of(dtype), " as q, or float32");
  STD_TORCH_CHECK(tensor.dim() == 2, op, ": ", what, " has ", tensor.dim(),
                  " dimensions, wanted [tokens, value heads]");
  STD_TORCH_CHECK(tensor.size(0) == v.size(0) && tensor.size(1) == v.size(1), op, ": ", what,
                  " has shape [", tensor.size(0), ", ", tensor.size(1), "], wanted [", v.size(0),
                  ", ", v.size(1), "]");
  return {tensor.const_data_ptr(), found, tensor.stride(0), tensor.stride(1)};
}

}  // namespace

Tensor states_of(const char* op, const char* what, const Tensor& tensor,
                 const DeltaRuleProblem& problem) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, op, ": ", what, " is ",
                  name_of(tensor.scalar_type()), ", wanted float32");
  STD_TORCH_CHECK(tensor.dim() == 4, op, ": ", what, " has ", tensor.dim(),
                  " dimensions, wanted [documents, value heads, key size, value size]");
  const std::size_t want[] = {problem.documents, problem.value_heads, problem.key_size,
                              problem.value_size};
  for (std::int64_t i = 0; i < 4; ++i)
    STD_TORCH_CHECK(tensor.size(i) == static_cast<std::int64_t>(want[i]), op, ": ", what,
                    " has shape [", tensor.size(0), ", ", tensor.size(1), ", ", tensor.size(2),
                    ", ", tensor.size(3), "], wanted [", want[0], ", ", want[1], ", ", want[2],
                    ", ", want[3], "]");
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

MutableGateView mutable_gates(const char* op, const Tensor& tensor) {
  return {tensor.mutable_data_ptr(), dtype_of(tensor.scalar_type(), op, "a gradient"),
          tensor.stride(0), tensor.stride(1)};
}

DeltaRuleArguments check_delta_rule(const char* op, const Tensor& q, const Tensor& k,
                                    const Tensor& v, const Tensor& g, const Tensor& beta,
                                    const Tensor& cu, const std::optional<Tensor>& state,
                                    double scale, bool l2norm) {
  check_three(op, "q", q);
  check_three(op, "k", k);
  check_three(op, "v", v);
  for (std::int64_t i = 0; i < 3; ++i)
    STD_TORCH_CHECK(k.size(i) == q.size(i), op, ": k has shape [", k.size(0), ", ", k.size(1), ", ",
                    k.size(2), "], wanted [", q.size(0), ", ", q.size(1), ", ", q.size(2),
                    "] as q");
  STD_TORCH_CHECK(v.size(0) == q.size(0), op, ": v has ", v.size(0), " tokens, q has ", q.size(0));
  STD_TORCH_CHECK(q.size(1) > 0 && v.size(1) > 0 && v.size(1) % q.size(1) == 0, op, ": ", v.size(1),
                  " value heads are no multiple of ", q.size(1), " key heads");
  const std::int64_t largest = static_cast<std::int64_t>(kLargestDeltaHead);
  STD_TORCH_CHECK(q.size(2) > 0 && q.size(2) <= largest, op, ": q has heads of ", q.size(2),
                  ", wanted 1 to ", largest);
  STD_TORCH_CHECK(v.size(2) > 0 && v.size(2) <= largest, op, ": v has heads of ", v.size(2),
                  ", wanted 1 to ", largest);
  check_given(op, "cu", cu);
  STD_TORCH_CHECK(cu.numel() >= 1, op, ": cu is empty, wanted at least one offset");
  DeltaRuleArguments a = {};
  const DType dtype = dtype_of(q.scalar_type(), op, "q");
  a.problem.dtype = dtype;
  a.problem.tokens = static_cast<std::size_t>(q.size(0));
  a.problem.key_heads = static_cast<std::size_t>(q.size(1));
  a.problem.value_heads = static_cast<std::size_t>(v.size(1));
  a.problem.key_size = static_cast<std::size_t>(q.size(2));
  a.problem.value_size = static_cast<std::size_t>(v.size(2));
  a.problem.scale = float32_of(op, "scale", scale);
  a.problem.l2norm = l2norm;
  a.problem.documents = static_cast<std::size_t>(cu.numel() - 1);
  a.problem.offsets = offsets_of(op, "cu", cu, cu.numel());
  a.q = heads_of(op, "q", q, dtype);
  a.k = heads_of(op, "k", k, dtype);
  a.v = heads_of(op, "v", v, dtype);
  a.g = gates_of(op, "g", g, v, dtype);
  a.beta = gates_of(op, "beta", beta, v, dtype);
  if (state) {
    a.state = states_of(op, "state", *state, a.problem);
    a.problem.state = static_cast<const float*>(a.state.const_data_ptr());
  }
  return a;
}

}  // namespace monograph::ops
