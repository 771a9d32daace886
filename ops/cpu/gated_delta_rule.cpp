// monograph::gated_delta_rule and its backward: the delta rule over documents packed in one row.
#include "monograph/kernels/gated_delta_rule/gated_delta_rule.h"

#include <optional>
#include <tuple>
#include <vector>

#include "arguments/device.h"
#include "arguments/gated_delta_rule.h"

namespace monograph::ops {
namespace {

std::vector<std::int64_t> shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

std::tuple<Tensor, Tensor> gated_delta_rule_cpu(const Tensor& q, const Tensor& k, const Tensor& v,
                                                const Tensor& g, const Tensor& beta,
                                                const Tensor& cu,
                                                const std::optional<Tensor>& state, double scale,
                                                bool l2norm, bool keep_state) {
  const char* const op = "gated_delta_rule";
  check_device(
      op, DeviceType::CPU,
      {{"q", q}, {"k", k}, {"v", v}, {"g", g}, {"beta", beta}, {"cu", cu}, {"state", state}});
  const DeltaRuleArguments a = check_delta_rule(op, q, k, v, g, beta, cu, state, scale, l2norm);
  const std::int64_t documents = keep_state ? cu.numel() - 1 : 0;
  Tensor out = empty(op, v, shape_of(v), v.scalar_type());
  Tensor final_state =
      empty(op, v, {documents, v.size(1), q.size(2), v.size(2)}, ScalarType::Float);
  DeltaRuleForward job = {};
  job.problem = a.problem;
  job.q = a.q.view;
  job.k = a.k.view;
  job.v = a.v.view;
  job.g = a.g;
  job.beta = a.beta;
  job.out = mutable_heads(out);
  job.final_state = keep_state ? static_cast<float*>(final_state.mutable_data_ptr()) : nullptr;
  gated_delta_rule(job, torch_parallel_for);
  return {out, final_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gated_delta_rule_backward_cpu(
    const Tensor& dout, const std::optional<Tensor>& dfinal, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& g, const Tensor& beta, const Tensor& cu,
    const std::optional<Tensor>& state, double scale, bool l2norm) {
  const char* const op = "gated_delta_rule_backward";
  check_device(op, DeviceType::CPU,
               {{"dout", dout},
                {"dfinal", dfinal},
                {"q", q},
                {"k", k},
                {"v", v},
                {"g", g},
                {"beta", beta},
                {"cu", cu},
                {"state", state}});
  const DeltaRuleArguments a = check_delta_rule(op, q, k, v, g, beta, cu, state, scale, l2norm);
  check_given(op, "dout", dout);
  STD_TORCH_CHECK(dout.dim() == 3, op, ": dout has ", dout.dim(),
                  " dimensions, wanted [tokens, heads, size]");
  for (std::int64_t i = 0; i < 3; ++i)
    STD_TORCH_CHECK(dout.size(i) == v.size(i), op, ": dout has shape [", dout.size(0), ", ",
                    dout.size(1), ", ", dout.size(2), "], wanted [", v.size(0), ", ", v.size(1),
                    ", ", v.size(2), "] as v");
  const HeadsArgument gradient = heads_of(op, "dout", dout, a.problem.dtype);
  Tensor dfinal_states;
  DeltaRuleBackward job = {};
  if (dfinal) {
    dfinal_states = states_of(op, "dfinal", *dfinal, a.problem);
    job.dfinal = static_cast<const float*>(dfinal_states.const_data_ptr());
  }
  Tensor dq = empty(op, q, shape_of(q), q.scalar_type());
  Tensor dk = empty(op, k, shape_of(k), k.scalar_type());
  Tensor dv = empty(op, v, shape_of(v), v.scalar_type());
  Tensor dg = empty(op, g, shape_of(g), g.scalar_type());
  Tensor dbeta = empty(op, beta, shape_of(beta), beta.scalar_type());
  std::vector<std::int64_t> state_shape = {0, v.size(1), q.size(2), v.size(2)};
  if (state) state_shape = shape_of(*state);
  Tensor dstate = empty(op, q, state_shape, ScalarType::Float);
  job.problem = a.problem;
  job.q = a.q.view;
  job.k = a.k.view;
  job.v = a.v.view;
  job.dout = gradient.view;
  job.g = a.g;
  job.beta = a.beta;
  job.dq = mutable_heads(dq);
  job.dk = mutable_heads(dk);
  job.dv = mutable_heads(dv);
  job.dg = mutable_gates(op, dg);
  job.dbeta = mutable_gates(op, dbeta);
  job.dstate = state ? static_cast<float*>(dstate.mutable_data_ptr()) : nullptr;
  gated_delta_rule_backward(job, torch_parallel_for);
  return {dq, dk, dv, dg, dbeta, dstate};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule_cpu));
  m.impl("gated_delta_rule_backward", TORCH_BOX(&gated_delta_rule_backward_cpu));
}

}  // namespace monograph::ops
