// monograph::choose_experts and its backward: which experts a token goes to, and with which
// weights.
#include <tuple>

#include "arguments/device.h"
#include "arguments/linear.h"
#include "monograph/kernels/experts/choose.h"

namespace monograph::ops {
namespace {

ChooseExperts problem_of(const char* op, const Tensor& logits, std::int64_t slots, bool normalise) {
  check_given(op, "logits", logits);
  STD_TORCH_CHECK(logits.dim() == 2, op, ": logits has ", logits.dim(), " dimensions, wanted 2");
  STD_TORCH_CHECK(slots >= 1 && slots <= logits.size(1), op, ": slots is ", slots,
                  ", wanted 1 to the experts, ", logits.size(1));
  const RowsArgument rows = rows_of(op, "logits", logits);
  return {rows.dtype, rows.matrix, static_cast<std::size_t>(slots), normalise};
}

std::tuple<Tensor, Tensor> choose_experts_cpu(const Tensor& logits, std::int64_t slots,
                                              bool normalise) {
  const char* const op = "choose_experts";
  check_device(op, DeviceType::CPU, {{"logits", logits}});
  const Tensor own = torch::stable::contiguous(logits);
  const ChooseExperts problem = problem_of(op, own, slots, normalise);
  Tensor weights = empty(op, logits, {logits.size(0), slots}, logits.scalar_type());
  Tensor ids = empty(op, logits, {logits.size(0), slots}, ScalarType::Long);
  choose_experts(problem, static_cast<std::int64_t*>(ids.mutable_data_ptr()),
                 weights.mutable_data_ptr(), torch_parallel_for);
  return {weights, ids};
}

Tensor choose_experts_backward_cpu(const Tensor& dweights, const Tensor& logits, const Tensor& ids,
                                   bool normalise) {
  const char* const op = "choose_experts_backward";
  check_device(op, DeviceType::CPU, {{"dweights", dweights}, {"logits", logits}, {"ids", ids}});
  check_given(op, "ids", ids);
  STD_TORCH_CHECK(ids.dim() == 2, op, ": ids has ", ids.dim(), " dimensions, wanted 2");
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Long, op, ": ids has dtype ",
                  name_of(ids.scalar_type()), ", wanted int64");
  check_given(op, "logits", logits);
  const Tensor own = torch::stable::contiguous(logits);
  const ChooseExperts problem = problem_of(op, own, ids.size(1), normalise);
  STD_TORCH_CHECK(ids.size(0) == logits.size(0), op, ": ids has ", ids.size(0), " rows, wanted ",
                  logits.size(0), " as logits");
  check_given(op, "dweights", dweights);
  STD_TORCH_CHECK(dweights.scalar_type() == logits.scalar_type(), op, ": dweights has dtype ",
                  name_of(dweights.scalar_type()), ", wanted that of logits");
  STD_TORCH_CHECK(
      dweights.dim() == 2 && dweights.size(0) == ids.size(0) && dweights.size(1) == ids.size(1), op,
      ": dweights does not have the shape of ids");
  const Tensor chosen = torch::stable::contiguous(ids);
  const Tensor given = torch::stable::contiguous(dweights);
  Tensor dlogits = empty(op, logits, {logits.size(0), logits.size(1)}, logits.scalar_type());
  choose_experts_backward(problem, static_cast<const std::int64_t*>(chosen.const_data_ptr()),
                          given.const_data_ptr(), dlogits.mutable_data_ptr(), torch_parallel_for);
  return dlogits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("choose_experts", TORCH_BOX(&choose_experts_cpu));
  m.impl("choose_experts_backward", TORCH_BOX(&choose_experts_backward_cpu));
}

}  // namespace monograph::ops
