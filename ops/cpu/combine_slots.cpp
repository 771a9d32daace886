// monograph::combine_slots: the rows of slots, weighted and summed for each token.
#include "arguments/device.h"
#include "arguments/linear.h"
#include "monograph/kernels/experts/experts.h"

namespace monograph::ops {
namespace {

const void* contiguous(const Tensor& tensor, Tensor& owner) {
  owner = tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
  return owner.const_data_ptr();
}

void check_shape(const char* op, const char* what, const Tensor& tensor, const Tensor& places) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.dim() == 2, op, ": ", what, " has ", tensor.dim(),
                  " dimensions, wanted 2");
  STD_TORCH_CHECK(tensor.size(0) == places.size(0) && tensor.size(1) == places.size(1), op, ": ",
                  what, " has shape [", tensor.size(0), ", ", tensor.size(1), "], wanted [",
                  places.size(0), ", ", places.size(1), "] as places");
}

Tensor combine_slots_cpu(const Tensor& rows, const Tensor& places,
                         const std::optional<Tensor>& weights) {
  const char* const op = "combine_slots";
  check_device(op, DeviceType::CPU, {{"rows", rows}, {"places", places}, {"weights", weights}});
  check_given(op, "rows", rows);
  STD_TORCH_CHECK(rows.dim() == 2, op, ": rows has ", rows.dim(), " dimensions, wanted 2");
  check_given(op, "places", places);
  STD_TORCH_CHECK(places.dim() == 2, op, ": places has ", places.dim(), " dimensions, wanted 2");
  STD_TORCH_CHECK(places.scalar_type() == ScalarType::Long, op, ": places has dtype ",
                  name_of(places.scalar_type()), ", wanted int64");
  const RowsArgument given = rows_of(op, "rows", rows);
  SlotSums sums;
  sums.dtype = given.dtype;
  sums.rows = given.matrix;
  sums.tokens = static_cast<std::size_t>(places.size(0));
  sums.slots = static_cast<std::size_t>(places.size(1));
  STD_TORCH_CHECK(sums.rows.rows < 0xffffffff, op, ": rows has ", sums.rows.rows,
                  " rows, wanted fewer than 2^32 - 1");
  Tensor places_owner, weights_owner;
  sums.places = static_cast<const std::int64_t*>(contiguous(places, places_owner));
  if (weights) {
    check_shape(op, "weights", *weights, places);
    sums.weights_dtype = dtype_of(weights->scalar_type(), op, "weights");
    STD_TORCH_CHECK(sums.weights_dtype == sums.dtype || sums.weights_dtype == DType::kFloat32, op,
                    ": weights has dtype ", name_of(weights->scalar_type()),
                    ", wanted float32 or that of rows");
    sums.weights = contiguous(*weights, weights_owner);
    if (weights->numel() == 0) sums.weights = nullptr;
  }
  Tensor out = empty(op, rows, {places.size(0), rows.size(1)}, rows.scalar_type());
  monograph::combine_slots(sums, out.mutable_data_ptr(), torch_parallel_for);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("combine_slots", TORCH_BOX(&combine_slots_cpu));
}

}  // namespace monograph::ops
