// monograph::rotary and its backward: rotary positions of queries and keys, with the norm of their
// heads.
#include "monograph/kernels/rotary/rotary.h"

#include <optional>
#include <tuple>
#include <vector>

#include "arguments/device.h"
#include "cpu/norm_gain.h"

namespace monograph::ops {
namespace {

struct HeadsArgument {
  Tensor owner;
  HeadRows rows;
};

// [batch, tokens, heads, size]; copied if batch and tokens do not lie at one stride.
HeadsArgument heads_of(const char* op, const char* what, const Tensor& tensor, ScalarType dtype) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, op, ": ", what, " is ",
                  name_of(tensor.scalar_type()), ", wanted ", name_of(dtype), " as q");
  STD_TORCH_CHECK(tensor.dim() == 4, op, ": ", what, " has ", tensor.dim(),
                  " dimensions, wanted [batch, tokens, heads, size]");
  const bool usable =
      tensor.numel() > 0 && tensor.stride(3) == 1 && tensor.stride(2) >= 0 &&
      tensor.stride(1) >= 0 &&
      (tensor.size(0) == 1 || tensor.stride(0) == tensor.stride(1) * tensor.size(1));
  HeadsArgument argument = {usable ? tensor : torch::stable::contiguous(tensor), {}};
  argument.rows = {argument.owner.const_data_ptr(),
                   static_cast<std::size_t>(argument.owner.stride(1)),
                   static_cast<std::size_t>(argument.owner.stride(2))};
  return argument;
}

// What q and k share.
struct Angles {
  Tensor cos, sin;
  std::size_t rows, rotated;
};

Tensor angles_of(const char* op, const char* what, const Tensor& tensor, const Tensor& q) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.scalar_type() == q.scalar_type(), op, ": ", what, " is ",
                  name_of(tensor.scalar_type()), ", wanted ", name_of(q.scalar_type()), " as q");
  STD_TORCH_CHECK(tensor.dim() == 3 && (tensor.size(0) == 1 || tensor.size(0) == q.size(0)) &&
                      tensor.size(1) == q.size(1),
                  op, ": ", what, " has ", tensor.dim(), " dimensions and ", tensor.numel(),
                  " elements, wanted [", q.size(0), " or 1, ", q.size(1), ", rotated]");
  return torch::stable::contiguous(tensor);
}

Angles check_angles(const char* op, const Tensor& cos, const Tensor& sin, const Tensor& q) {
  Angles angles = {angles_of(op, "cos", cos, q), angles_of(op, "sin", sin, q), 0, 0};
  STD_TORCH_CHECK(cos.size(0) == sin.size(0) && cos.size(2) == sin.size(2), op, ": cos has ",
                  cos.numel(), " elements, sin has ", sin.numel());
  STD_TORCH_CHECK(cos.size(2) > 0 && cos.size(2) % 2 == 0, op, ": cos has ", cos.size(2),
                  " columns, wanted an even number above 0");
  angles.rows = static_cast<std::size_t>(cos.size(0) * cos.size(1));
  angles.rotated = static_cast<std::size_t>(cos.size(2));
  return angles;
}

struct Options {
  double eps;
  bool one_plus_weight, round_before_weight, interleaved;
};

// One of q and k; `gain` lives as long as the problem.
RotaryProblem problem_of(const char* op, const char* what, const Tensor& x, const Angles& angles,
                         const std::optional<Tensor>& weight, const Options& options,
                         std::vector<float>& gain) {
  const std::int64_t largest = static_cast<std::int64_t>(kLargestRotaryHead);
  STD_TORCH_CHECK(x.size(3) >= static_cast<std::int64_t>(angles.rotated), op, ": ", what,
                  " has heads of ", x.size(3), ", wanted the ", angles.rotated,
                  " columns of cos or more");
  STD_TORCH_CHECK(x.size(3) <= largest, op, ": ", what, " has heads of ", x.size(3), ", wanted ",
                  largest, " at most");
  RotaryProblem p = {};
  p.dtype = dtype_of(x.scalar_type(), op, what);
  p.tokens = x.numel() == 0 ? 0 : static_cast<std::size_t>(x.size(0) * x.size(1));
  p.heads = static_cast<std::size_t>(x.size(2));
  p.size = static_cast<std::size_t>(x.size(3));
  p.rotated = angles.rotated;
  p.interleaved = options.interleaved;
  p.cos = angles.cos.const_data_ptr();
  p.sin = angles.sin.const_data_ptr();
  p.angles = angles.rows;
  p.eps = epsilon_of(op, options.eps);
  p.rounding = rounding_of(options.round_before_weight);
  if (!weight) return p;
  STD_TORCH_CHECK(!options.round_before_weight || weight->scalar_type() == x.scalar_type(), op,
                  ": the weight of ", what, " is ", name_of(weight->scalar_type()), ", wanted ",
                  name_of(x.scalar_type()), " as ", what);
  gain = gain_of(op, "the norm's weight", weight, 1, p.size, options.one_plus_weight);
  p.gain = gain.data();
  return p;
}

void check_beside(const char* op, const char* what, const Tensor& tensor, const Tensor& q) {
  STD_TORCH_CHECK(tensor.size(0) == q.size(0) && tensor.size(1) == q.size(1), op, ": ", what,
                  " has ", tensor.size(0), " x ", tensor.size(1), " tokens, q has ", q.size(0),
                  " x ", q.size(1));
}

Tensor empty_like(const char* op, const Tensor& x) {
  return empty(op, x, {x.sizes().begin(), x.sizes().end()}, x.scalar_type());
}

std::tuple<Tensor, Tensor> rotary_cpu(const Tensor& q, const Tensor& k, const Tensor& cos,
                                      const Tensor& sin, const std::optional<Tensor>& q_weight,
                                      const std::optional<Tensor>& k_weight, double eps,
                                      bool one_plus_weight, bool round_before_weight,
                                      bool interleaved) {
  const char* const op = "rotary";
  check_device(op, DeviceType::CPU,
               {{"q", q},
                {"k", k},
                {"cos", cos},
                {"sin", sin},
                {"q_weight", q_weight},
                {"k_weight", k_weight}});
  check_given(op, "q", q);
  const HeadsArgument queries = heads_of(op, "q", q, q.scalar_type());
  const HeadsArgument keys = heads_of(op, "k", k, q.scalar_type());
  check_beside(op, "k", k, q);
  const Angles angles = check_angles(op, cos, sin, q);
  const Options options = {eps, one_plus_weight, round_before_weight, interleaved};
  std::vector<float> q_gain, k_gain;
  const RotaryProblem of_q = problem_of(op, "q", q, angles, q_weight, options, q_gain);
  const RotaryProblem of_k = problem_of(op, "k", k, angles, k_weight, options, k_gain);
  Tensor q_out = empty_like(op, q), k_out = empty_like(op, k);
  rotary({of_q, queries.rows, q_out.mutable_data_ptr()}, torch_parallel_for);
  rotary({of_k, keys.rows, k_out.mutable_data_ptr()}, torch_parallel_for);
  return {q_out, k_out};
}

// The gradient of one of q and k, and of its weight.
std::tuple<Tensor, Tensor> gradient_of(const char* op, const char* what, const Tensor& dy,
                                       const std::optional<Tensor>& x, const Angles& angles,
                                       const std::optional<Tensor>& weight, const Options& options,
                                       bool need_dweight) {
  std::vector<float> gain;
  RotaryBackward job = {};
  job.problem = problem_of(op, what, dy, angles, weight, options, gain);
  const HeadsArgument above = heads_of(op, what, dy, dy.scalar_type());
  job.dy = above.rows;
  HeadsArgument input = {above.owner, above.rows};
  if (weight) {
    STD_TORCH_CHECK(x, op, ": the norm of ", what, " has a weight, but its input is None");
    input = heads_of(op, what, *x, dy.scalar_type());
    bool same = true;
    for (std::int64_t i = 0; i < 4; ++i) same = same && x->size(i) == dy.size(i);
    STD_TORCH_CHECK(same, op, ": the input of ", what, " has another shape than its gradient");
  }
  job.x = input.rows;
  Tensor dx = empty_like(op, dy);
  job.dx = dx.mutable_data_ptr();
  const bool need = weight && need_dweight;
  Tensor dweight = empty(op, dy, {need ? dy.size(3) : 0}, ScalarType::Float);
  if (need) job.dgain = static_cast<float*>(dweight.mutable_data_ptr());
  rotary_backward(job, torch_parallel_for);
  return {dx, dweight};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> rotary_backward_cpu(
    const Tensor& dq, const Tensor& dk, const std::optional<Tensor>& q,
    const std::optional<Tensor>& k, const Tensor& cos, const Tensor& sin,
    const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight, double eps,
    bool one_plus_weight, bool round_before_weight, bool interleaved, bool need_dweight) {
  const char* const op = "rotary_backward";
  check_device(op, DeviceType::CPU,
               {{"dq", dq},
                {"dk", dk},
                {"q", q},
                {"k", k},
                {"cos", cos},
                {"sin", sin},
                {"q_weight", q_weight},
                {"k_weight", k_weight}});
  check_given(op, "dq", dq);
  heads_of(op, "dq", dq, dq.scalar_type());
  heads_of(op, "dk", dk, dq.scalar_type());
  check_beside(op, "dk", dk, dq);
  const Angles angles = check_angles(op, cos, sin, dq);
  const Options options = {eps, one_plus_weight, round_before_weight, interleaved};
  const auto [dq_out, dq_weight] =
      gradient_of(op, "q", dq, q, angles, q_weight, options, need_dweight);
  const auto [dk_out, dk_weight] =
      gradient_of(op, "k", dk, k, angles, k_weight, options, need_dweight);
  return {dq_out, dk_out, dq_weight, dk_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("rotary", TORCH_BOX(&rotary_cpu));
  m.impl("rotary_backward", TORCH_BOX(&rotary_backward_cpu));
}

}  // namespace monograph::ops
