#include "monograph/train/projection.h"

#include "monograph/base/float_types.h"
#include "monograph/kernels/gram/gram.h"
#include "monograph/kernels/linear/linear.h"
#include "monograph/kernels/seeded_dropout/seeded_dropout.h"

namespace monograph::train {
namespace {

constexpr std::size_t kGrain = 1 << 14;

void round_to(Activations& out, std::span<const float> values, float factor,
              const Workers& workers) {
  with_type(out.dtype(), [&]<class T>() {
    T* const to = static_cast<T*>(out.data());
    workers.parallel_for(out.size(), kGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) to[i] = from_float<T>(values[i] * factor);
    });
  });
}

void drop(const void* x, Activations& out, std::uint64_t stream, const Dropout& dropout,
          const Workers& workers) {
  seeded_dropout(
      {out.dtype(), x, out.data(), out.size(), 0, dropout.seed, stream, dropout.probability},
      workers.parallel_for);
}

// to[i] = factor * round(left^T right)
void gradient_of_factor(const Activations& left, const Activations& right, float factor,
                        std::span<float> to, const Workers& workers) {
  Activations rounded(left.dtype(), left.cols(), right.cols());
  gram({left.dtype(), left.in(), right.in(), nullptr, left.dtype(), rounded.data()},
       workers.parallel_for);
  with_type(left.dtype(), [&]<class T>() {
    const T* const from = static_cast<const T*>(rounded.data());
    for (std::size_t i = 0; i < rounded.size(); ++i) to[i] = to_float(from[i]) * factor;
  });
}

}  // namespace

void Projection::round_factors(DType dtype, std::span<const float> parameters,
                               const Workers& workers) {
  if (lora == nullptr) return;
  if (a.size() == 0) {
    a = Activations(dtype, lora->rank, lora->inputs);
    b = Activations(dtype, lora->outputs, lora->rank);
  }
  round_to(a, parameters.subspan(lora->a, a.size()), static_cast<float>(lora->scaling), workers);
  round_to(b, parameters.subspan(lora->b, b.size()), 1.0f, workers);
}

void project(const Activations& x, std::span<const Product> products, const Dropout& dropout,
             const Workers& workers) {
  const bool drops = dropout.probability > 0;
  std::vector<LinearOutput> inner, outer;
  std::vector<LinearTerm> terms(products.size());
  for (std::size_t i = 0; i < products.size(); ++i) {
    const auto& [projection, u, y] = products[i];
    LinearOutput output = {projection->weight, {}, projection->bias, {}};
    if (projection->lora != nullptr) {
      const LinearOutput low = {projection->a.weight(), {}, nullptr, u->out()};
      terms[i] = {u->in(), projection->b.weight()};
      output.low_rank = {&terms[i], 1};
      if (!drops) {
        inner.push_back(low);
      } else {
        Activations dropped(x.dtype(), x.rows(), x.cols());
        drop(x.data(), dropped, projection->lora->stream, dropout, workers);
        linear(x.dtype(), dropped.in(), {&low, 1}, workers.parallel_for);
      }
    }
    if (y == nullptr) continue;
    output.y = y->out();
    outer.push_back(output);
  }
  if (!inner.empty()) linear(x.dtype(), x.in(), inner, workers.parallel_for);
  if (!outer.empty()) linear(x.dtype(), x.in(), outer, workers.parallel_for);
}

void GradientSum::take(const Workers& workers) {
  if (!empty_) add(sum_, room_, workers);
  empty_ = false;
}

void project_backward(const Projection& projection, const Activations& x, const Activations& u,
                      const Activations& dy, GradientSum* dx, const Dropout& dropout,
                      std::span<float> gradient, const Workers& workers) {
  const DType dtype = x.dtype();
  const LinearTerm base = {dy.in(), projection.weight};
  const LoraPlace* const lora = projection.lora;
  if (lora == nullptr) {
    if (dx == nullptr) return;
    linear_dx(dtype, {&base, 1}, dx->next().out(), workers.parallel_for);
    return dx->take(workers);
  }
  const bool drops = dropout.probability > 0;
  Activations du(dtype, x.rows(), lora->rank);
  const LinearTerm inner = {dy.in(), projection.b.weight()};
  linear_dx(dtype, {&inner, 1}, du.out(), workers.parallel_for);
  const LinearTerm both[] = {base, {du.in(), projection.a.weight()}};
  if (dx != nullptr) {
    linear_dx(dtype, {both, drops ? std::size_t{1} : std::size_t{2}}, dx->next().out(),
              workers.parallel_for);
    dx->take(workers);
  }
  const auto place = [&](std::size_t begin, std::size_t size) {
    return gradient.subspan(begin, size);
  };
  gradient_of_factor(dy, u, 1.0f, place(lora->b, projection.b.size()), workers);
  const float scaling = static_cast<float>(lora->scaling);
  const std::span<float> of_a = place(lora->a, projection.a.size());
  if (!drops) return gradient_of_factor(du, x, scaling, of_a, workers);
  Activations dropped(dtype, x.rows(), x.cols());
  drop(x.data(), dropped, lora->stream, dropout, workers);
  gradient_of_factor(du, dropped, scaling, of_a, workers);
  if (dx == nullptr) return;
  Activations& part = dx->next();
  linear_dx(dtype, {&both[1], 1}, part.out(), workers.parallel_for);
  drop(part.data(), part, lora->stream, dropout, workers);
  dx->take(workers);
}

}  // namespace monograph::train
