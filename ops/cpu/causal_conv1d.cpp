// monograph::causal_conv1d and its backward: the short convolution over documents of a packed row.
#include "monograph/kernels/causal_conv1d/causal_conv1d.h"

#include <optional>
#include <tuple>
#include <vector>

#include "arguments/device.h"
#include "arguments/documents.h"

namespace monograph::ops {
namespace {

// What a problem points into, where the tensor itself did not do.
struct Owners {
  std::vector<Tensor> tensors;

  const void* contiguous(const Tensor& tensor) {
    tensors.push_back(tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor));
    return tensors.back().const_data_ptr();
  }
  // Channels or tokens side by side; anything else is copied.
  TokensView view(const Tensor& tensor) {
    const auto token = static_cast<std::size_t>(tensor.stride(0));
    const auto channel = static_cast<std::size_t>(tensor.stride(1));
    if (channel == 1 || tensor.size(1) == 1) return {tensor.const_data_ptr(), token, 1};
    if (token == 1 || tensor.size(0) == 1) return {tensor.const_data_ptr(), 1, channel};
    return {contiguous(tensor), static_cast<std::size_t>(tensor.size(1)), 1};
  }
};

void check_type(const char* op, const char* what, const Tensor& tensor, DType wanted) {
  check_given(op, what, tensor);
  const DType found = dtype_of(tensor.scalar_type(), op, what);
  STD_TORCH_CHECK(found == wanted, op, ": ", what, " is ", name_of(found), ", wanted ",
                  name_of(wanted), " as x");
}

// The type of a weight or bias: that of x, or float32.
DType parameter_type(const char* op, const char* what, const Tensor& tensor, DType x) {
  const DType found = dtype_of(tensor.scalar_type(), op, what);
  STD_TORCH_CHECK(found == x || found == DType::kFloat32, op, ": ", what, " is ", name_of(found),
                  ", wanted ", name_of(x), " as x, or float32");
  return found;
}

void check_state(const char* op, const char* what, const Tensor& tensor,
                 const ConvProblem& problem) {
  check_type(op, what, tensor, problem.dtype);
  const bool fits = tensor.dim() == 3 &&
                    tensor.size(0) == static_cast<std::int64_t>(problem.documents) &&
                    tensor.size(1) == static_cast<std::int64_t>(problem.channels) &&
                    tensor.size(2) == static_cast<std::int64_t>(problem.taps - 1);
  STD_TORCH_CHECK(fits, op, ": ", what, " has the wrong shape, wanted [", problem.documents, ", ",
                  problem.channels, ", ", problem.taps - 1, "]");
}

ConvProblem check_problem(const char* op, const Tensor& x, const Tensor& weight,
                          const std::optional<Tensor>& bias, const Tensor& cu,
                          const std::optional<Tensor>& state, bool silu, Owners& owners) {
  check_given(op, "x", x);
  check_given(op, "weight", weight);
  STD_TORCH_CHECK(x.dim() == 2, op, ": x has ", x.dim(), " dimensions, wanted [tokens, channels]");
  ConvProblem problem = {};
  problem.dtype = dtype_of(x.scalar_type(), op, "x");
  STD_TORCH_CHECK(x.size(1) > 0, op, ": x has 0 channels, wanted 1 or more");
  problem.tokens = static_cast<std::size_t>(x.size(0));
  problem.channels = static_cast<std::size_t>(x.size(1));
  problem.silu = silu;
  problem.weight_dtype = parameter_type(op, "weight", weight, problem.dtype);
  STD_TORCH_CHECK(weight.dim() == 2, op, ": weight has ", weight.dim(),
                  " dimensions, wanted [channels, taps]");
  STD_TORCH_CHECK(weight.size(1) >= 1 && weight.size(1) <= static_cast<std::int64_t>(kMostTaps), op,
                  ": weight has ", weight.size(1), " taps, wanted 1 to ", kMostTaps);
  problem.taps = static_cast<std::size_t>(weight.size(1));
  STD_TORCH_CHECK(weight.size(0) == x.size(1), op, ": weight has ", weight.size(0),
                  " channels, x has ", x.size(1));
  const DocumentsArgument documents = documents_of(op, "cu", cu);
  problem.documents = documents.count;
  problem.offsets = documents.offsets;
  if (bias) {
    problem.bias_dtype = parameter_type(op, "bias", *bias, problem.dtype);
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == x.size(1), op, ": bias has ",
                    bias->numel(), " elements in ", bias->dim(), " dimensions, wanted [", x.size(1),
                    "]");
    problem.bias = owners.contiguous(*bias);
  }
  if (state) {
    check_state(op, "state", *state, problem);
    problem.state = owners.contiguous(*state);
  }
  problem.weight = owners.contiguous(weight);
  problem.x = owners.view(x);
  return problem;
}

std::vector<std::int64_t> state_shape(const ConvProblem& problem, std::size_t documents) {
  return {static_cast<std::int64_t>(documents), static_cast<std::int64_t>(problem.channels),
          static_cast<std::int64_t>(problem.taps - 1)};
}

std::tuple<Tensor, Tensor> causal_conv1d_cpu(const Tensor& x, const Tensor& weight,
                                             const std::optional<Tensor>& bias, const Tensor& cu,
                                             const std::optional<Tensor>& state, bool silu,
                                             bool keep_state) {
  const char* const op = "causal_conv1d";
  check_device(op, DeviceType::CPU,
               {{"x", x}, {"weight", weight}, {"bias", bias}, {"cu", cu}, {"state", state}});
  Owners owners;
  ConvForward job = {};
  job.problem = check_problem(op, x, weight, bias, cu, state, silu, owners);
  Tensor y = empty(op, x, {x.size(0), x.size(1)}, x.scalar_type());
  const std::size_t kept = keep_state ? job.problem.documents : 0;
  Tensor final_state = empty(op, x, state_shape(job.problem, kept), x.scalar_type());
  job.y = y.mutable_data_ptr();
  job.final_state = keep_state ? final_state.mutable_data_ptr() : nullptr;
  causal_conv1d(job, torch_parallel_for);
  return {y, final_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward_cpu(
    const Tensor& dy, const std::optional<Tensor>& dfinal, const Tensor& x, const Tensor& weight,
    const std::optional<Tensor>& bias, const Tensor& cu, const std::optional<Tensor>& state,
    bool silu, const std::vector<bool>& need) {
  const char* const op = "causal_conv1d_backward";
  check_device(op, DeviceType::CPU,
               {{"dy", dy},
                {"dfinal", dfinal},
                {"x", x},
                {"weight", weight},
                {"bias", bias},
                {"cu", cu},
                {"state", state}});
  Owners owners;
  ConvBackward job = {};
  job.problem = check_problem(op, x, weight, bias, cu, state, silu, owners);
  check_type(op, "dy", dy, job.problem.dtype);
  STD_TORCH_CHECK(dy.dim() == 2 && dy.size(0) == x.size(0) && dy.size(1) == x.size(1), op,
                  ": dy has the wrong shape, wanted [", x.size(0), ", ", x.size(1), "] as x");
  job.dy = owners.view(dy);
  if (dfinal) {
    check_state(op, "dfinal", *dfinal, job.problem);
    job.dfinal = owners.contiguous(*dfinal);
  }
  STD_TORCH_CHECK(need.size() == 4, op, ": need has ", need.size(), " entries, wanted 4");
  const auto wanted = [&](bool needed, const std::vector<std::int64_t>& shape, ScalarType type) {
    return empty(op, x, needed ? shape : std::vector<std::int64_t>{0}, type);
  };
  const bool with_bias = need[2] && bias, with_state = need[3] && state;
  Tensor dx = wanted(need[0], {x.size(0), x.size(1)}, x.scalar_type());
  Tensor dweight = wanted(need[1], {weight.size(0), weight.size(1)}, ScalarType::Float);
  Tensor dbias = wanted(with_bias, {x.size(1)}, ScalarType::Float);
  Tensor dstate =
      wanted(with_state, state_shape(job.problem, job.problem.documents), x.scalar_type());
  if (need[0]) job.dx = dx.mutable_data_ptr();
  if (need[1]) job.dweight = static_cast<float*>(dweight.mutable_data_ptr());
  if (with_bias) job.dbias = static_cast<float*>(dbias.mutable_data_ptr());
  if (with_state) job.dstate = dstate.mutable_data_ptr();
  causal_conv1d_backward(job, torch_parallel_for);
  return {dx, dweight, dbias, dstate};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d_cpu));
  m.impl("causal_conv1d_backward", TORCH_BOX(&causal_conv1d_backward_cpu));
}

}  // namespace monograph::ops
