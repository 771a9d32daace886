#include "cuda/loss_panels.h"

#include <algorithm>

namespace monograph::ops {
namespace {

float* floats(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

}  // namespace

LossOfHead loss_by_panels(const char* op, const LossBackend& backend, const HeadArguments& head,
                          const Tensor& x, const Tensor& values, const std::optional<Tensor>& bias,
                          bool need_dx, bool statistics) {
  const CrossEntropyProblem& problem = head.problem;
  const std::size_t tokens = problem.x.rows, vocabulary = problem.weight.packed.rows;
  LossOfHead found = {
      float_vector(x, tokens),
      float_vector(x, tokens),
      need_dx ? empty_rows(op, x, problem.x.cols) : torch::stable::new_empty(x, {0}),
      {},
      {},
      {},
      {}};
  if (statistics) {
    found.entropy = float_vector(x, tokens);
    found.log_sum_squares = float_vector(x, tokens);
    found.mean = float_vector(x, tokens);
    found.top = torch::stable::new_empty(x, {static_cast<std::int64_t>(tokens)}, ScalarType::Bool);
  }
  const std::size_t chunk =
      gpu::chunk_tokens(tokens, vocabulary, size_bytes(problem.dtype), backend.logits_bytes);
  if (chunk == 0) return found;
  const Tensor rows = as_matrix(x);
  const std::optional<Tensor> dx =
      need_dx ? std::optional<Tensor>(as_matrix(found.dx)) : std::nullopt;
  const PanelWeight weight = {problem.weight, values};
  const Tensor scratch =
      empty(op, x, {static_cast<std::int64_t>(chunk), static_cast<std::int64_t>(vocabulary)},
            x.scalar_type());
  for (std::size_t begin = 0; begin < tokens; begin += chunk) {
    const std::size_t end = std::min(begin + chunk, tokens);
    const Tensor logits = part(scratch, 0, 0, end - begin);
    panel_product(op, backend.panels, logits, part(rows, 0, begin, end), weight, bias);
    const auto at = [&](const std::optional<Tensor>& list) {
      return list ? floats(*list) + begin : nullptr;
    };
    backend.rows(
        {logits.mutable_data_ptr(), problem.dtype, end - begin, vocabulary, vocabulary, problem.map,
         problem.labels + begin, floats(found.loss) + begin, floats(found.lse) + begin,
         at(found.entropy), at(found.log_sum_squares), at(found.mean),
         found.top ? static_cast<bool*>(found.top->mutable_data_ptr()) + begin : nullptr, need_dx},
        backend.panels.stream);
    if (dx)
      panel_product_dx(op, backend.panels, part(*dx, 0, begin, end), logits, weight, std::nullopt);
  }
  return found;
}

}  // namespace monograph::ops
