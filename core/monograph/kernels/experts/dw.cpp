// The gradients of plain weights, as products over tokens: an expert's tokens are the reduction.
#include <algorithm>
#include <cstring>

#include "monograph/base/float_types.h"
#include "monograph/kernels/experts/factors.h"
#include "monograph/kernels/experts/layer.h"
#include "monograph/kernels/linear/linear.h"

namespace monograph {
namespace {

// Rows of the gradient that wait for another type; operands of experts that are multiplied
// together.
constexpr std::size_t kRows = 128, kBytes = std::size_t{16} << 20;

// One side of a sum of outer products; each row times its factor, where there are factors.
struct Side {
  ExpertsRows rows;
  const float* factors;
};

// The rows of an expert, brought together: [count, cols], or [cols, count] if `transposed`.
template <class T>
void gather(const ExpertsLayer& layer, const Side& side, std::size_t i, bool transposed, T* out) {
  const Matrix& matrix = side.rows.matrix;
  const std::size_t first = layer.routing.first(i), count = layer.routing.rows(i);
  constexpr std::size_t kBlock = 16;
  const auto fill = [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      const std::size_t place = first + t;
      const std::size_t row = side.rows.by_token ? layer.routing.tokens[place] : place;
      const T* in = static_cast<const T*>(matrix.data) + row * matrix.stride;
      const float factor = side.factors == nullptr ? 1 : side.factors[place];
      for (std::size_t c = 0; c < matrix.cols; ++c)
        out[transposed ? c * count + t : t * matrix.cols + c] =
            from_float<T>(factor * to_float(in[c]));
    }
  };
  layer.parallel_for((count + kBlock - 1) / kBlock, 1, [&](std::size_t begin, std::size_t end) {
    fill(begin * kBlock, std::min(end * kBlock, count));
  });
}

class WeightGradient {
 public:
  WeightGradient(const ExpertsLayer& layer, const Side& left, const Side& right, void* out,
                 DType dtype)
      : layer_(layer),
        left_(left),
        right_(right),
        out_(static_cast<std::byte*>(out)),
        dtype_(dtype),
        rows_(left.rows.matrix.cols),
        cols_(right.rows.matrix.cols) {}

  void run() {
    const std::size_t active = layer_.routing.active.size();
    if (active != layer_.problem.experts)
      std::memset(out_, 0, layer_.problem.experts * rows_ * cols_ * size_bytes(dtype_));
    std::size_t used = 0;
    for (std::size_t i = 0; i < active; ++i) {
      const std::size_t bytes = layer_.routing.rows(i) * (rows_ + cols_) * layer_.element();
      if (used != 0 && used + bytes > kBytes) {
        multiply();
        used = 0;
      }
      used += bytes;
      add(i);
    }
    multiply();
  }

 private:
  struct Expert {
    std::size_t index;
    Buffer left, right;
    LinearTerm term;
  };

  void add(std::size_t i) {
    const std::size_t count = layer_.routing.rows(i), element = layer_.element();
    Expert expert = {layer_.routing.active[i],
                     Buffer(count * rows_ * element),
                     Buffer(count * cols_ * element),
                     {}};
    with_type(layer_.problem.dtype, [&]<class T>() {
      gather(layer_, left_, i, true, reinterpret_cast<T*>(expert.left.data()));
      gather(layer_, right_, i, false, reinterpret_cast<T*>(expert.right.data()));
    });
    expert.term.left = {expert.left.data(), rows_, count, count};
    expert.term.weight.dtype = layer_.problem.dtype;
    expert.term.weight.packed.rows = count;
    expert.term.weight.packed.cols = cols_;
    expert.term.weight.packed.values = reinterpret_cast<const std::uint8_t*>(expert.right.data());
    experts_.push_back(std::move(expert));
  }

  std::byte* place(const Expert& expert, std::size_t row) const {
    return out_ + (expert.index * rows_ + row) * cols_ * size_bytes(dtype_);
  }

  void multiply() {
    if (dtype_ == layer_.problem.dtype) {
      std::vector<LinearProduct> products;
      for (const Expert& expert : experts_)
        products.push_back({{&expert.term, 1}, {place(expert, 0), rows_, cols_, cols_}, rows_});
      linear_products(dtype_, Pass::kDx, products, layer_.parallel_for);
    } else {
      for (const Expert& expert : experts_) multiply_and_convert(expert);
    }
    experts_.clear();
  }

  void multiply_and_convert(const Expert& expert) const {
    const Buffer strip(std::min(kRows, rows_) * cols_ * layer_.element());
    for (std::size_t row = 0; row < rows_; row += kRows) {
      const std::size_t count = std::min(kRows, rows_ - row);
      LinearTerm term = expert.term;
      term.left.data = expert.left.data() + row * term.left.stride * layer_.element();
      term.left.rows = count;
      const LinearProduct product = {{&term, 1}, {strip.data(), count, cols_, cols_}, count};
      linear_products(layer_.problem.dtype, Pass::kDx, {&product, 1}, layer_.parallel_for);
      convert(strip.data(), layer_.problem.dtype, count * cols_, place(expert, row), dtype_);
    }
  }

  const ExpertsLayer& layer_;
  const Side left_, right_;
  std::byte* const out_;
  const DType dtype_;
  const std::size_t rows_, cols_;
  std::vector<Expert> experts_;
};

}  // namespace

void experts_dw(const ExpertsProblem& problem, const Matrix& dy, const void* pre, void* d_values1,
                void* d_values2, ParallelFor parallel_for) {
  const ExpertsLayer layer(problem, parallel_for);
  const std::size_t inner = layer.inner(), width = problem.up.out;
  const ExpertsRows dy_rows = {dy, true};
  Buffer own;
  if (pre == nullptr) {
    own = layer.places_by(width);
    layer.compute_pre(layer.up.low_rank(layer.x()), own.data());
    pre = own.data();
  }
  const auto gradient = [&](const Side& out, const Side& in, void* values, DType dtype) {
    if (problem.transposed)
      WeightGradient(layer, in, out, values, dtype).run();
    else
      WeightGradient(layer, out, in, values, dtype).run();
  };
  {
    const Buffer h = layer.activate(pre);
    gradient({dy_rows, layer.place_weights.data()}, {layer.rows(h.data(), inner), nullptr},
             d_values2, problem.down.dtype);
  }
  Buffer dh = layer.places_by(inner);
  layer.down.back(dy_rows, layer.down.low_rank_back(dy_rows), 0,
                  {dh.data(), layer.kept(), inner, inner});
  const Buffer dpre = own ? std::move(own) : layer.places_by(width);
  layer.activate_back(pre, dh, dpre.data(), nullptr, /*keep_h=*/false);
  dh = {};
  gradient({layer.rows(dpre.data(), width), nullptr}, {layer.x(), nullptr}, d_values1,
           problem.up.dtype);
}

}  // namespace monograph
