#include "cuda/panels.h"

namespace monograph::ops {
namespace {

std::int64_t number(std::size_t size) { return static_cast<std::int64_t>(size); }

bool is_plain(const LinearWeight& weight) { return weight.packed.format == Format::kPlain; }

// The elements of a plain weight as a matrix.
Tensor plain_matrix(const PanelWeight& w) {
  const PackedView& view = w.weight.packed;
  return torch::stable::reshape(w.values, {number(view.rows), number(view.cols)});
}

// One panel after another of a weight that is cut along its rows or its columns.
class PanelWalk {
 public:
  PanelWalk(const char* op, const PanelBackend& backend, const Tensor& like, const PanelWeight& w,
            bool by_rows)
      : backend_(backend),
        w_(w),
        by_rows_(by_rows),
        dtype_(dtype_of(like.scalar_type(), op, "x")),
        type_(like.scalar_type()) {
    const PackedView& view = w.weight.packed;
    cut = gpu::cut_panels(by_rows ? view.rows : view.cols, by_rows ? view.cols : view.rows,
                          size_bytes(dtype_), backend.panel_bytes);
    if (is_plain(w.weight)) {
      plain_ = plain_matrix(w);
      if (w.weight.dtype == dtype_) cut = {cut.extent, cut.across, cut.extent, 1};
    } else if (cut.count != 0) {
      scratch_ = empty(op, like, {number(cut.scratch_elements())}, type_);
    }
  }

  // [rows, cols] of the region, in the type of the activations; valid until the next.
  Tensor panel(std::size_t i) const {
    const std::size_t begin = cut.begin(i), end = cut.end(i), size = end - begin;
    if (is_plain(w_.weight)) return in_type(part(plain_, by_rows_ ? 0 : 1, begin, end), type_);
    const PackedView& view = w_.weight.packed;
    const Region region =
        by_rows_ ? Region{begin, size, 0, view.cols} : Region{0, view.rows, begin, size};
    if (size * cut.across != 0)
      backend_.decode(view, region, dtype_, scratch_.mutable_data_ptr(), backend_.stream);
    return torch::stable::reshape(part(scratch_, 0, 0, size * cut.across),
                                  {number(region.rows), number(region.cols)});
  }

  gpu::PanelCut cut;

 private:
  const PanelBackend& backend_;
  const PanelWeight& w_;
  bool by_rows_;
  DType dtype_;
  ScalarType type_;
  Tensor plain_, scratch_;
};

// The columns of `added` that fall into a panel's result.
std::optional<Tensor> columns(const std::optional<Tensor>& added, std::size_t begin,
                              std::size_t end) {
  if (!added) return std::nullopt;
  return part(*added, added->dim() - 1, begin, end);
}

}  // namespace

void panel_product(const char* op, const PanelBackend& backend, const Tensor& out, const Tensor& x,
                   const PanelWeight& w, const std::optional<Tensor>& added) {
  const PanelWalk walk(op, backend, x, w, /*by_rows=*/true);
  for (std::size_t i = 0; i < walk.cut.count; ++i) {
    const std::size_t begin = walk.cut.begin(i), end = walk.cut.end(i);
    product_into(part(out, 1, begin, end), x, walk.panel(i), columns(added, begin, end));
  }
}

void panel_product_dx(const char* op, const PanelBackend& backend, const Tensor& out,
                      const Tensor& g, const PanelWeight& w, const std::optional<Tensor>& added) {
  const PanelWalk walk(op, backend, g, w, /*by_rows=*/false);
  for (std::size_t i = 0; i < walk.cut.count; ++i) {
    const std::size_t begin = walk.cut.begin(i), end = walk.cut.end(i);
    product_into(part(out, 1, begin, end), g, transposed(walk.panel(i)),
                 columns(added, begin, end));
  }
}

}  // namespace monograph::ops
