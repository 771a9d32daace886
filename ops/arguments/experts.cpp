#include "arguments/experts.h"

#include <cmath>
#include <string>
#include <utility>

#include "monograph/base/error.h"

namespace monograph::ops {
namespace {

// A table of this many rows is the only memory that grows with the number of experts alone.
constexpr std::int64_t kMostExperts = std::int64_t{1} << 20;

void check_two(const char* op, const char* what, const Tensor& tensor) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.dim() == 2, op, ": ", what, " has ", tensor.dim(),
                  " dimensions, wanted 2");
}

void check_size(const char* op, const std::string& what, const Tensor& tensor, std::size_t rows,
                std::size_t cols) {
  check_two(op, what.c_str(), tensor);
  STD_TORCH_CHECK(static_cast<std::size_t>(tensor.size(0)) == rows &&
                      static_cast<std::size_t>(tensor.size(1)) == cols,
                  op, ": ", what, " has shape [", tensor.size(0), ", ", tensor.size(1),
                  "], wanted [", rows, ", ", cols, "]");
}

const void* contiguous(const Tensor& tensor, std::vector<Tensor>& owners) {
  owners.push_back(tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor));
  return owners.back().const_data_ptr();
}

// The sizes of a stack of matrices, [E, rows, cols].
struct Sizes {
  std::size_t experts, rows, cols;
};

Sizes sizes_of(const char* op, const char* what, const Layout& layout) {
  STD_TORCH_CHECK(layout.shape.size() == 3, op, ": ", what, " has ", layout.shape.size(),
                  " dimensions, wanted 3");
  const std::int64_t experts = layout.shape[0], rows = layout.shape[1], cols = layout.shape[2];
  STD_TORCH_CHECK(experts >= 0 && experts <= kMostExperts, op, ": ", what, " has ", experts,
                  " experts, wanted 0 to ", kMostExperts);
  STD_TORCH_CHECK(rows > 0 && cols > 0, op, ": ", what, " has matrices of ", rows, " x ", cols,
                  ", wanted at least 1 x 1");
  return {static_cast<std::size_t>(experts), static_cast<std::size_t>(rows),
          static_cast<std::size_t>(cols)};
}

// One stack of matrices as the schema has it.
struct StackArgument {
  const Tensor& values;
  std::vector<Tensor> scales;
  Layout layout;
};

PackedGrids plain_stack(const char* op, const char* what, const StackArgument& stack,
                        const Sizes& sizes) {
  const Layout& layout = stack.layout;
  check_given(op, "values", stack.values);
  STD_TORCH_CHECK(stack.scales.empty(), op, ": ", what, " of a plain weight has ",
                  stack.scales.size(), " scales, wanted 0");
  STD_TORCH_CHECK(layout.block == 0 && layout.origin == 0 && layout.grid_rows == 0, op, ": ", what,
                  " of a plain weight has a block, an origin or grids, wanted none");
  STD_TORCH_CHECK(stack.values.is_contiguous(), op, ": a plain weight must be contiguous");
  std::size_t rows = 0, elements = 0;
  STD_TORCH_CHECK(!__builtin_mul_overflow(sizes.experts, sizes.rows, &rows) &&
                      !__builtin_mul_overflow(rows, sizes.cols, &elements) &&
                      static_cast<std::size_t>(stack.values.numel()) == elements,
                  op, ": a plain weight has ", stack.values.numel(), " elements, ", what, " says ",
                  sizes.experts, " x ", sizes.rows, " x ", sizes.cols);
  PackedGrids plain;
  plain.first.rows = rows;
  plain.first.cols = sizes.cols;
  plain.first.values = static_cast<const std::uint8_t*>(stack.values.const_data_ptr());
  return plain;
}

bool is_plain(const Layout& layout) {
  return layout.format == static_cast<std::int64_t>(Format::kPlain);
}

PackedGrids packed_stack(const char* op, const char* what, const StackArgument& stack,
                         const Sizes& sizes) {
  const Layout& layout = stack.layout;
  const FormatInfo* info = find_format(static_cast<Format>(layout.format));
  STD_TORCH_CHECK(layout.origin == 0 || (info != nullptr && info->shape == BlockShape::kFlat), op,
                  ": ", what, " has the origin ", layout.origin,
                  ", wanted 0 where blocks begin anew with each expert");
  PackedGrids grids = check_packed(op, stack.values, stack.scales, layout).weight;
  const std::size_t rows = layout.grid_rows;
  STD_TORCH_CHECK(rows == 0 || sizes.rows % rows == 0, op, ": ", what, " has grids of ", rows,
                  " rows, wanted a part of the ", sizes.rows, " rows of an expert");
  return grids;
}

Sizes bind_weight(const char* op, const char* what, const ExpertsWeight& weight, bool transposed,
                  ExpertsProjection& projection) {
  const StackArgument stack = {weight.values, weight.scales, read_layout(op, weight.layout)};
  const Sizes sizes = sizes_of(op, what, stack.layout);
  if (is_plain(stack.layout)) {
    projection.weight = plain_stack(op, what, stack, sizes);
    projection.dtype = dtype_of(weight.values.scalar_type(), op, "a plain weight");
  } else {
    STD_TORCH_CHECK(!transposed, op,
                    ": transposed is true for a packed weight, wanted a plain one");
    projection.weight = packed_stack(op, what, stack, sizes);
  }
  projection.out = transposed ? sizes.cols : sizes.rows;
  projection.in = transposed ? sizes.rows : sizes.cols;
  return sizes;
}

// Gate and up apart: [-2, scales of gate, length, *gate's layout, *up's]; behind gate's scales come
// the values and the scales of up.
constexpr std::int64_t kPair = -2;

void join_alternating(const char* op, ExpertsProjection& projection) {
  try {
    projection.weight = alternating(projection.weight, *projection.up_half);
  } catch (const Error& error) {
    refuse(op, ": interleaved is true for two stacks: ", error.what());
  }
  projection.up_half.reset();
}

Sizes bind_pair(const char* op, const ExpertsWeight& weight, bool transposed, bool interleaved,
                ExpertsProjection& projection) {
  constexpr const char* kForm = "[-2, scales of gate, length, *layout of gate, *layout of up]";
  const std::vector<std::int64_t>& numbers = weight.layout;
  const auto left = static_cast<std::int64_t>(numbers.size()) - 3;
  STD_TORCH_CHECK(left >= 0 && numbers[2] >= 0 && numbers[2] <= left, op, ": layout1 has ",
                  numbers.size(), " entries, wanted ", kForm);
  const std::int64_t scales = numbers[1];
  STD_TORCH_CHECK(scales >= 0 && static_cast<std::size_t>(scales) < weight.scales.size(), op,
                  ": layout1 claims ", scales, " scales of gate, scales1 has ",
                  weight.scales.size(), " tensors, wanted those and the values of up behind");
  STD_TORCH_CHECK(!transposed, op, ": transposed is true for two stacks, wanted a plain weight");
  const auto middle = numbers.begin() + 3 + numbers[2];
  const auto values = weight.scales.begin() + scales;
  const StackArgument gate = {weight.values,
                              {weight.scales.begin(), values},
                              read_layout(op, {numbers.begin() + 3, middle})};
  const StackArgument up = {
      *values, {values + 1, weight.scales.end()}, read_layout(op, {middle, numbers.end()})};
  const Sizes sizes = sizes_of(op, "layout1", gate.layout);
  const Sizes others = sizes_of(op, "layout1", up.layout);
  STD_TORCH_CHECK(
      others.experts == sizes.experts && others.rows == sizes.rows && others.cols == sizes.cols, op,
      ": gate has ", sizes.experts, " experts of ", sizes.rows, " x ", sizes.cols, ", up has ",
      others.experts, " of ", others.rows, " x ", others.cols);
  STD_TORCH_CHECK(!is_plain(gate.layout) && !is_plain(up.layout), op,
                  ": gate and up are two stacks and one is plain, wanted two packed ones");
  projection.weight = packed_stack(op, "layout1", gate, sizes);
  projection.up_half = packed_stack(op, "layout1", up, sizes);
  if (interleaved) join_alternating(op, projection);
  projection.out = 2 * sizes.rows;
  projection.in = sizes.cols;
  return {sizes.experts, projection.out, sizes.cols};
}

Sizes bind_first(const char* op, const ExpertsWeight& weight, const ExpertsNumbers& numbers,
                 ExpertsProblem& problem) {
  if (weight.layout.empty() || weight.layout[0] != kPair)
    return bind_weight(op, "layout1", weight, numbers.transposed, problem.up);
  STD_TORCH_CHECK(is_gated(problem.activation), op, ": layout1 has two stacks for activation ",
                  numbers.activation, ", which has no gate");
  return bind_pair(op, weight, numbers.transposed, numbers.interleaved, problem.up);
}

void bind_low_rank(const char* op, const std::string& which, const ExpertsWeight& weight,
                   std::size_t experts, ExpertsProjection& projection,
                   std::vector<Tensor>& owners) {
  projection.scale = 1;
  STD_TORCH_CHECK(std::isfinite(weight.scale), op, ": lora_scale", which, " is ", weight.scale,
                  ", wanted a number");
  STD_TORCH_CHECK(weight.a.has_value() == weight.b.has_value(), op, ": a", which, " and b", which,
                  " must come together");
  if (!weight.a) return;
  const std::string a = "a" + which, b = "b" + which;
  check_two(op, a.c_str(), *weight.a);
  const auto rows = static_cast<std::size_t>(weight.a->size(0));
  STD_TORCH_CHECK(experts > 0 && rows % experts == 0, op, ": ", a, " has ", rows,
                  " rows, wanted a rank times ", experts, " experts");
  check_size(op, a, *weight.a, rows, projection.in);
  check_size(op, b, *weight.b, projection.out, rows);
  projection.a_dtype = dtype_of(weight.a->scalar_type(), op, a.c_str());
  projection.b_dtype = dtype_of(weight.b->scalar_type(), op, b.c_str());
  projection.a = contiguous(*weight.a, owners);
  projection.b = contiguous(*weight.b, owners);
  projection.rank = rows / experts;
  projection.scale = static_cast<float>(weight.scale);
  STD_TORCH_CHECK(std::isfinite(projection.scale), op, ": lora_scale", which, " is ", weight.scale,
                  ", wanted a number in the range of float32");
}

void bind_bias(const char* op, const std::string& which, const ExpertsWeight& weight,
               std::size_t experts, ExpertsProjection& projection, std::vector<Tensor>& owners) {
  if (!weight.bias) return;
  const std::string bias = "bias" + which;
  check_size(op, bias, *weight.bias, experts, projection.out);
  projection.bias_dtype = dtype_of(weight.bias->scalar_type(), op, bias.c_str());
  projection.bias = contiguous(*weight.bias, owners);
  if (experts == 0) projection.bias = nullptr;
}

void bind_numbers(const char* op, const ExpertsNumbers& numbers, ExpertsProblem& problem) {
  STD_TORCH_CHECK(numbers.activation >= 0 &&
                      numbers.activation < static_cast<std::int64_t>(kExpertsActivations),
                  op, ": activation is ", numbers.activation, ", wanted 0 to ",
                  kExpertsActivations - 1);
  problem.activation = static_cast<ExpertsActivation>(numbers.activation);
  STD_TORCH_CHECK(is_gated(problem.activation) || !numbers.interleaved, op,
                  ": interleaved is true for activation ", numbers.activation,
                  ", which has no gate");
  problem.interleaved = numbers.interleaved;
  problem.transposed = numbers.transposed;
  problem.alpha = static_cast<float>(numbers.alpha);
  STD_TORCH_CHECK(std::isfinite(problem.alpha), op, ": alpha is ", numbers.alpha,
                  ", wanted a number in the range of float32");
  const bool clamps = problem.activation == ExpertsActivation::kClampedSiluMul ||
                      problem.activation == ExpertsActivation::kClampedGlu;
  if (!clamps) return;
  problem.limit = static_cast<float>(numbers.limit);
  STD_TORCH_CHECK(std::isfinite(problem.limit) && problem.limit >= 0x1p-60f, op, ": limit is ",
                  numbers.limit, ", wanted a positive number in the range of float32");
}

const std::int64_t* int64_of(const char* op, const char* what, const Tensor& tensor,
                             std::vector<Tensor>& owners) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long, op, ": ", what, " has dtype ",
                  name_of(tensor.scalar_type()), ", wanted int64");
  return static_cast<const std::int64_t*>(contiguous(tensor, owners));
}

void bind_weights(const char* op, const Tensor& weights, ExpertsArguments& arguments) {
  ExpertsProblem& problem = arguments.problem;
  problem.weights_dtype = dtype_of(weights.scalar_type(), op, "weights");
  STD_TORCH_CHECK(
      problem.weights_dtype == problem.dtype || problem.weights_dtype == DType::kFloat32, op,
      ": weights has dtype ", name_of(weights.scalar_type()), ", wanted float32 or that of x");
  problem.weights = contiguous(weights, arguments.owners);
}

void bind_routes(const char* op, const Tensor& ids, const Tensor& weights,
                 ExpertsArguments& arguments) {
  ExpertsProblem& problem = arguments.problem;
  check_two(op, "ids", ids);
  check_size(op, "ids", ids, problem.tokens, static_cast<std::size_t>(ids.size(1)));
  problem.slots = static_cast<std::size_t>(ids.size(1));
  check_size(op, "weights", weights, problem.tokens, problem.slots);
  std::size_t all = 0;
  STD_TORCH_CHECK(!__builtin_mul_overflow(problem.tokens, problem.slots, &all) && all < 0xffffffff,
                  op, ": ids has ", problem.tokens, " x ", problem.slots,
                  " entries, wanted fewer than 2^32 - 1");
  problem.ids = int64_of(op, "ids", ids, arguments.owners);
  bind_weights(op, weights, arguments);
}

void check_list(const char* op, const char* what, const Tensor& tensor, std::size_t count) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.dim() == 1, op, ": ", what, " has ", tensor.dim(),
                  " dimensions, wanted 1");
  STD_TORCH_CHECK(static_cast<std::size_t>(tensor.size(0)) == count, op, ": ", what, " has ",
                  tensor.size(0), " entries, wanted ", count, " as ids");
}

void bind_slots(const char* op, const Tensor& rows, const Tensor& ids, const Tensor* weights,
                ExpertsArguments& arguments) {
  ExpertsProblem& problem = arguments.problem;
  check_given(op, "ids", ids);
  STD_TORCH_CHECK(ids.dim() == 1, op, ": ids has ", ids.dim(), " dimensions, wanted 1");
  problem.tokens = static_cast<std::size_t>(ids.size(0));
  problem.slots = 1;
  STD_TORCH_CHECK(problem.tokens < 0xffffffff, op, ": ids has ", problem.tokens,
                  " entries, wanted fewer than 2^32 - 1");
  check_list(op, "rows", rows, problem.tokens);
  problem.ids = int64_of(op, "ids", ids, arguments.owners);
  problem.slot_rows = int64_of(op, "rows", rows, arguments.owners);
  if (weights == nullptr) return;
  check_list(op, "weights", *weights, problem.tokens);
  bind_weights(op, *weights, arguments);
}

ExpertsArguments bind_layer(const char* op, const Tensor& x, const ExpertsWeight& first,
                            const ExpertsWeight& second, const ExpertsNumbers& numbers) {
  ExpertsArguments arguments;
  ExpertsProblem& problem = arguments.problem;
  bind_numbers(op, numbers, problem);
  const Sizes sizes = bind_first(op, first, numbers, problem);
  const Sizes below = bind_weight(op, "layout2", second, numbers.transposed, problem.down);
  problem.experts = sizes.experts;
  const std::size_t hidden = problem.up.in, width = problem.up.out;
  const std::size_t inner = is_gated(problem.activation) ? width / 2 : width;
  STD_TORCH_CHECK(!is_gated(problem.activation) || width % 2 == 0, op, ": gate and up have ", width,
                  " rows together, wanted two halves");
  STD_TORCH_CHECK(
      below.experts == sizes.experts && problem.down.out == hidden && problem.down.in == inner, op,
      ": the second weight has ", below.experts, " experts of ", problem.down.out, " x ",
      problem.down.in, ", wanted ", sizes.experts, " of ", hidden, " x ", inner);
  check_two(op, "x", x);
  const RowsArgument rows = rows_of(op, "x", x);
  STD_TORCH_CHECK(rows.matrix.cols == hidden, op, ": x has ", rows.matrix.cols, " columns, wanted ",
                  hidden);
  problem.dtype = rows.dtype;
  problem.x = rows.matrix;
  problem.tokens = rows.matrix.rows;
  arguments.owners.push_back(rows.owner);
  bind_bias(op, "1", first, sizes.experts, problem.up, arguments.owners);
  bind_bias(op, "2", second, sizes.experts, problem.down, arguments.owners);
  bind_low_rank(op, "1", first, sizes.experts, problem.up, arguments.owners);
  bind_low_rank(op, "2", second, sizes.experts, problem.down, arguments.owners);
  return arguments;
}

}  // namespace

ExpertsArguments check_experts(const char* op, const Tensor& x, const Tensor& ids,
                               const Tensor& weights, const ExpertsWeight& first,
                               const ExpertsWeight& second, const ExpertsNumbers& numbers) {
  ExpertsArguments arguments = bind_layer(op, x, first, second, numbers);
  bind_routes(op, ids, weights, arguments);
  return arguments;
}

ExpertsArguments check_experts_slots(const char* op, const Tensor& x, const Tensor& rows,
                                     const Tensor& ids, const Tensor* weights,
                                     const ExpertsWeight& first, const ExpertsWeight& second,
                                     const ExpertsNumbers& numbers) {
  ExpertsArguments arguments = bind_layer(op, x, first, second, numbers);
  bind_slots(op, rows, ids, weights, arguments);
  return arguments;
}

RowsArgument check_experts_dy(const char* op, const Tensor& dy, const ExpertsArguments& arguments) {
  const ExpertsProblem& problem = arguments.problem;
  check_two(op, "dy", dy);
  return rows_of(op, "dy", dy, problem.x.rows, problem.down.out, problem.dtype);
}

ExpertsGradientArguments check_experts_gradient(const char* op, const Tensor& dy, const Tensor& pre,
                                                const ExpertsArguments& arguments) {
  const ExpertsProblem& problem = arguments.problem;
  RowsArgument dy_rows = check_experts_dy(op, dy, arguments);
  check_two(op, "pre", pre);
  const bool saved = pre.size(0) != 0;
  check_size(op, "pre", pre, saved ? problem.all_slots() : 0, problem.up.out);
  ExpertsGradientArguments found = {
      std::move(dy_rows),
      rows_of(op, "pre", pre, saved ? problem.all_slots() : 0, problem.up.out, problem.dtype)};
  if (found.pre.matrix.stride != problem.up.out) {
    found.pre.owner = torch::stable::contiguous(pre);
    found.pre.matrix.data = found.pre.owner.const_data_ptr();
    found.pre.matrix.stride = problem.up.out;
  }
  return found;
}

}  // namespace monograph::ops
