#include "cuda/linear_panels.h"

namespace monograph::ops {

Tensor linear_by_panels(const char* op, const PanelBackend& backend, const Tensor& x,
                        const PanelWeight& w, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& u, const std::optional<Tensor>& b) {
  Tensor y = empty_rows(op, x, w.weight.packed.rows);
  if (y.numel() == 0) return y;
  const Tensor out = as_matrix(y);
  std::optional<Tensor> added = bias;
  if (u) {
    product_into(out, as_matrix(*u), in_type(*b, x.scalar_type()), bias);
    added = out;
  }
  panel_product(op, backend, out, as_matrix(x), w, added);
  return y;
}

Tensor linear_dx_by_panels(const char* op, const PanelBackend& backend,
                           const std::vector<GradientTerm>& terms) {
  Tensor dx = empty_rows(op, terms.front().g, terms.front().weight.packed.cols);
  if (dx.numel() == 0) return dx;
  const Tensor out = as_matrix(dx);
  std::optional<Tensor> added;
  for (const GradientTerm& term : terms) {
    panel_product_dx(op, backend, out, as_matrix(term.g), {term.weight, term.values}, added);
    added = out;
  }
  return dx;
}

GradientTerm low_rank_term(const Tensor& du, const Tensor& a) {
  GradientTerm term = {du, {}, in_type(a, du.scalar_type())};
  term.weight.dtype = dtype_of(du.scalar_type(), "linear_dx", "du");
  term.weight.packed.rows = static_cast<std::size_t>(a.size(0));
  term.weight.packed.cols = static_cast<std::size_t>(a.size(1));
  return term;
}

}  // namespace monograph::ops
