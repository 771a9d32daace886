// monograph::varlen_attention and its backward: attention over documents packed in one row.
#include "monograph/kernels/varlen_attention/varlen_attention.h"

#include <tuple>

#include "arguments/device.h"
#include "arguments/varlen_attention.h"

namespace monograph::ops {
namespace {

int thread_count() { return static_cast<int>(torch::stable::get_num_threads()); }

std::tuple<Tensor, Tensor> varlen_attention_cpu(const Tensor& q, const Tensor& k, const Tensor& v,
                                                const Tensor& cu_q, const Tensor& cu_k,
                                                const std::optional<Tensor>& key_lengths,
                                                const std::optional<Tensor>& sinks, bool causal,
                                                std::int64_t window, double scale, double softcap) {
  const char* const op = "varlen_attention";
  check_device(op, DeviceType::CPU,
               {{"q", q},
                {"k", k},
                {"v", v},
                {"cu_q", cu_q},
                {"cu_k", cu_k},
                {"key_lengths", key_lengths},
                {"sinks", sinks}});
  AttentionForward job = {};
  job.problem =
      check_problem(op, q, k, v, cu_q, cu_k, key_lengths, sinks, causal, window, scale, softcap);
  const HeadsArgument queries = heads_of(op, "q", q, job.problem.dtype);
  const HeadsArgument keys = heads_of(op, "k", k, job.problem.dtype);
  const HeadsArgument values = heads_of(op, "v", v, job.problem.dtype);
  job.q = queries.view;
  job.k = keys.view;
  job.v = values.view;
  Tensor out = empty(op, q, {q.size(0), q.size(1), v.size(2)}, q.scalar_type());
  Tensor lse = empty(op, q, {q.size(1), q.size(0)}, ScalarType::Float);
  job.out = mutable_heads(out);
  job.lse = static_cast<float*>(lse.mutable_data_ptr());
  varlen_attention(job, torch_parallel_for, thread_count());
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> varlen_attention_backward_cpu(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, const Tensor& cu_q, const Tensor& cu_k,
    const std::optional<Tensor>& key_lengths, const std::optional<Tensor>& sinks, bool causal,
    std::int64_t window, double scale, double softcap) {
  const char* const op = "varlen_attention_backward";
  check_device(op, DeviceType::CPU,
               {{"dout", dout},
                {"q", q},
                {"k", k},
                {"v", v},
                {"out", out},
                {"lse", lse},
                {"cu_q", cu_q},
                {"cu_k", cu_k},
                {"key_lengths", key_lengths},
                {"sinks", sinks}});
  AttentionBackward job = {};
  job.problem =
      check_problem(op, q, k, v, cu_q, cu_k, key_lengths, sinks, causal, window, scale, softcap);
  check_results(op, q, v, out, dout, lse);
  const DType dtype = job.problem.dtype;
  const HeadsArgument queries = heads_of(op, "q", q, dtype), keys = heads_of(op, "k", k, dtype),
                      values = heads_of(op, "v", v, dtype),
                      result = heads_of(op, "out", out, dtype),
                      gradient = heads_of(op, "dout", dout, dtype);
  job.q = queries.view;
  job.k = keys.view;
  job.v = values.view;
  job.out = result.view;
  job.dout = gradient.view;
  job.lse = static_cast<const float*>(lse.const_data_ptr());
  Tensor dq = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)});
  Tensor dk = torch::stable::new_empty(k, {k.size(0), k.size(1), k.size(2)});
  Tensor dv = torch::stable::new_empty(v, {v.size(0), v.size(1), v.size(2)});
  Tensor dsinks = torch::stable::new_empty(q, {sinks ? q.size(1) : 0}, ScalarType::Float);
  job.dq = mutable_heads(dq);
  job.dk = mutable_heads(dk);
  job.dv = mutable_heads(dv);
  job.dsinks = sinks ? static_cast<float*>(dsinks.mutable_data_ptr()) : nullptr;
  varlen_attention_backward(job, torch_parallel_for, thread_count());
  return {dq, dk, dv, dsinks};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention_cpu));
  m.impl("varlen_attention_backward", TORCH_BOX(&varlen_attention_backward_cpu));
}

}  // namespace monograph::ops
