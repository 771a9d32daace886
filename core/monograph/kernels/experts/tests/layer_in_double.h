// A layer of experts for tests, drawn at random, and its values and gradients in double, by the
// formulas alone.
#pragma once

#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/formats/tests/small_weights.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/experts/experts.h"

namespace monograph {

using Doubles = std::vector<double>;

inline Bytes stored(DType dtype, const Doubles& values) {
  Bytes bytes(values.size() * size_bytes(dtype));
  with_type(dtype, [&]<class T>() {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const T element = from_float<T>(static_cast<float>(values[i]));
      std::memcpy(bytes.data() + i * sizeof(T), &element, sizeof(T));
    }
  });
  return bytes;
}

inline Doubles loaded(DType dtype, const Bytes& bytes) {
  Doubles values(bytes.size() / size_bytes(dtype));
  with_type(dtype, [&]<class T>() {
    for (std::size_t i = 0; i < values.size(); ++i) {
      T element;
      std::memcpy(&element, bytes.data() + i * sizeof(T), sizeof(T));
      values[i] = static_cast<double>(to_float(element));
    }
  });
  return values;
}

struct LayerShape {
  std::string format = "plain";
  DType dtype = DType::kBFloat16;
  ExpertsActivation activation = ExpertsActivation::kSiluMul;
  bool interleaved = false, transposed = false, biases = false;
  std::size_t rank1 = 0, rank2 = 0;
  std::size_t experts = 5, hidden = 70, inner = 37, tokens = 23, slots = 2;
  DType side = DType::kFloat32;  // of biases, factors and routing weights
  std::string name() const {
    return format + " " + name_of(dtype) + " activation " +
           std::to_string(static_cast<int>(activation)) + (interleaved ? " interleaved" : "") +
           (transposed ? " transposed" : "") + (biases ? " biases" : "") + " ranks " +
           std::to_string(rank1) + " " + std::to_string(rank2);
  }
};

struct Stack {
  std::optional<SmallWeight> packed;
  Bytes plain;    // in the type of x
  Doubles dense;  // [E, out, in]
  Bytes bias, a, b;
  Doubles bias_values, a_values, b_values;
};

struct Layer {
  LayerShape shape;
  Bytes x, weights;
  std::vector<std::int64_t> ids;
  Doubles x_values, weight_values;
  Stack up, down;
  ExpertsProblem problem;

  Layer(const LayerShape& s, unsigned seed) : shape(s), random(seed) {
    const std::size_t width = is_gated(s.activation) ? 2 * s.inner : s.inner;
    problem.dtype = s.dtype;
    problem.experts = s.experts;
    problem.tokens = s.tokens;
    problem.slots = s.slots;
    problem.transposed = s.transposed;
    problem.activation = s.activation;
    problem.interleaved = s.interleaved;
    problem.alpha = 1.702f;
    problem.limit = 1.25f;
    bind(up, problem.up, width, s.hidden, s.rank1, 0.5f);
    bind(down, problem.down, s.hidden, s.inner, s.rank2, 1.5f);
    x = stored(s.dtype, normal(s.tokens * s.hidden, 1.0));
    x_values = loaded(s.dtype, x);
    problem.x = {x.data(), s.tokens, s.hidden, s.hidden};
    // The last expert gets no token; some slots go nowhere.
    for (std::size_t i = 0; i < s.tokens * s.slots; ++i) {
      const std::int64_t id = static_cast<std::int64_t>(random() % (s.experts + 1)) - 1;
      ids.push_back(id == static_cast<std::int64_t>(s.experts) - 1 ? id + 1 : id);
    }
    weights = stored(s.side, normal(ids.size(), 1.0));
    weight_values = loaded(s.side, weights);
    problem.ids = ids.data();
    problem.weights = weights.data();
    problem.weights_dtype = s.side;
  }
  Layer(const Layer&) = delete;

  // [E, out, in] as the layer stores it.
  Doubles as_stored(const Doubles& dense, const ExpertsProjection& p) const {
    if (!shape.transposed) return dense;
    Doubles transposed(dense.size());
    for (std::size_t e = 0; e < shape.experts; ++e)
      for (std::size_t i = 0; i < p.in; ++i)
        for (std::size_t o = 0; o < p.out; ++o)
          transposed[(e * p.in + i) * p.out + o] = dense[(e * p.out + o) * p.in + i];
    return transposed;
  }

  // The same layer on its dequantised weights.
  void use_plain() {
    for (auto [stack, projection] :
         {std::pair(&up, &problem.up), std::pair(&down, &problem.down)}) {
      projection->weight = {};
      projection->weight.first.rows = shape.experts * projection->out;
      projection->weight.first.cols = projection->in;
      projection->weight.first.values = stack->plain.data();
      projection->dtype = shape.dtype;
    }
  }

  Doubles normal(std::size_t count, double scale) {
    std::normal_distribution<double> distribution(0, scale);
    Doubles values(count);
    for (double& v : values) v = distribution(random);
    return values;
  }

  std::mt19937 random;

 private:
  void bind(Stack& stack, ExpertsProjection& projection, std::size_t out, std::size_t in,
            std::size_t rank, float scale) {
    const std::size_t count = shape.experts * out * in;
    projection.in = in;
    projection.out = out;
    if (shape.format == "plain") {
      stack.plain = stored(shape.dtype, normal(count, 1 / std::sqrt(static_cast<double>(in))));
      stack.dense = loaded(shape.dtype, stack.plain);
      projection.weight.first.rows = shape.experts * (shape.transposed ? in : out);
      projection.weight.first.cols = shape.transposed ? out : in;
      projection.dtype = shape.dtype;
      if (shape.transposed) {  // stored as [E, in, out]
        Doubles dense(count);
        for (std::size_t e = 0; e < shape.experts; ++e)
          for (std::size_t i = 0; i < in; ++i)
            for (std::size_t o = 0; o < out; ++o)
              dense[(e * out + o) * in + i] = stack.dense[(e * in + i) * out + o];
        stack.dense = dense;
      }
      projection.weight.first.values = stack.plain.data();
    } else {
      const bool nf4 = shape.format == "nf4", fp8 = shape.format == "fp8-block";
      const ScaleKind kind = nf4                       ? ScaleKind::kFp32
                             : fp8                     ? ScaleKind::kBf16
                             : shape.format == "mxfp4" ? ScaleKind::kE8m0
                                                       : ScaleKind::kE4m3;
      const std::size_t block = nf4 ? 64 : fp8 ? 128 : shape.format == "mxfp4" ? 32 : 16;
      stack.packed.emplace(small_weight(shape.format.c_str(), kind, block, nf4,
                                        {shape.experts, out, in}, static_cast<unsigned>(random())));
      stack.plain.resize(count * size_bytes(shape.dtype));
      dequantize(stack.packed->view, shape.dtype, stack.plain.data(), serial_for);
      stack.dense = loaded(shape.dtype, stack.plain);
      projection.weight.first = stack.packed->view;
    }
    if (shape.biases) {
      stack.bias = stored(shape.side, normal(shape.experts * out, 0.3));
      stack.bias_values = loaded(shape.dtype, stored(shape.dtype, loaded(shape.side, stack.bias)));
      projection.bias = stack.bias.data();
      projection.bias_dtype = shape.side;
    }
    if (rank == 0) return;
    const auto factor = [&](std::size_t size, double deviation, Bytes& bytes) {
      bytes = stored(shape.side, normal(size, deviation));
      return loaded(shape.dtype, stored(shape.dtype, loaded(shape.side, bytes)));
    };
    stack.a_values = factor(shape.experts * rank * in, 1 / std::sqrt(double(in)), stack.a);
    stack.b_values = factor(out * rank * shape.experts, 0.5, stack.b);
    projection.a = stack.a.data();
    projection.b = stack.b.data();
    projection.a_dtype = projection.b_dtype = shape.side;
    projection.rank = rank;
    projection.scale = scale;
  }
};

// out = W_e in + scale B_e A_e in + bias_e, and what backward adds to its gradients.
struct Exact {
  const Layer& layer;
  const Stack& stack;
  const ExpertsProjection& p;
  Doubles da, db, dbias, dense;

  Exact(const Layer& l, const Stack& s, const ExpertsProjection& projection)
      : layer(l),
        stack(s),
        p(projection),
        da(s.a_values.size()),
        db(s.b_values.size()),
        dbias(s.bias_values.size()),
        dense(s.dense.size()) {}

  double b_at(std::size_t e, std::size_t o, std::size_t j) const {
    return stack.b_values[(o * p.rank + j) * layer.shape.experts + e];
  }
  Doubles low(std::size_t e, const double* in) const {
    Doubles u(p.rank);
    for (std::size_t j = 0; j < p.rank; ++j)
      for (std::size_t i = 0; i < p.in; ++i)
        u[j] += double(p.scale) * stack.a_values[(e * p.rank + j) * p.in + i] * in[i];
    return u;
  }
  Doubles forward(std::size_t e, const double* in) const {
    Doubles out(p.out);
    const Doubles u = low(e, in);
    for (std::size_t o = 0; o < p.out; ++o) {
      if (!stack.bias_values.empty()) out[o] = stack.bias_values[e * p.out + o];
      for (std::size_t i = 0; i < p.in; ++i)
        out[o] += stack.dense[(e * p.out + o) * p.in + i] * in[i];
      for (std::size_t j = 0; j < p.rank; ++j) out[o] += b_at(e, o, j) * u[j];
    }
    return out;
  }
  Doubles back(std::size_t e, const double* in, const double* dout) {
    Doubles din(p.in), du(p.rank);
    const Doubles u = low(e, in);
    for (std::size_t o = 0; o < p.out; ++o) {
      if (!dbias.empty()) dbias[e * p.out + o] += dout[o];
      for (std::size_t i = 0; i < p.in; ++i) {
        din[i] += stack.dense[(e * p.out + o) * p.in + i] * dout[o];
        dense[(e * p.out + o) * p.in + i] += in[i] * dout[o];
      }
      for (std::size_t j = 0; j < p.rank; ++j) {
        du[j] += double(p.scale) * b_at(e, o, j) * dout[o];
        db[(o * p.rank + j) * layer.shape.experts + e] += u[j] * dout[o];
      }
    }
    for (std::size_t j = 0; j < p.rank; ++j)
      for (std::size_t i = 0; i < p.in; ++i) {
        din[i] += du[j] * stack.a_values[(e * p.rank + j) * p.in + i];
        da[(e * p.rank + j) * p.in + i] += du[j] * in[i];
      }
    return din;
  }
};

// The activation of one pair; without a gate `up` is not looked at.
inline double exact_activation(const ExpertsProblem& p, double gate, double up) {
  const double limit = p.limit, g = std::fmin(gate, limit),
               u = std::fmax(-limit, std::fmin(up, limit));
  switch (p.activation) {
    case ExpertsActivation::kSiluMul:
      return gate / (1 + std::exp(-gate)) * up;
    case ExpertsActivation::kClampedSiluMul:
      return g / (1 + std::exp(-g)) * u;
    case ExpertsActivation::kClampedGlu:
      return (u + 1) * g / (1 + std::exp(-double(p.alpha) * g));
    case ExpertsActivation::kGeluTanhMul:
      return 0.5 * gate *
             (1 + std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate))) * up;
    case ExpertsActivation::kReluSquare:
      return gate > 0 ? gate * gate : 0;
    case ExpertsActivation::kSilu:
      break;
  }
  return gate / (1 + std::exp(-gate));
}

// By differences of fourth order, from within a clamp towards its side: values that are rounded lie
// at no corner but the corner itself, whose slope is that of the side within.
inline double exact_slope(const ExpertsProblem& p, double gate, double up, bool of_gate) {
  const double limit = p.limit, at = of_gate ? gate : up;
  const bool clamps = p.activation == ExpertsActivation::kClampedSiluMul ||
                      p.activation == ExpertsActivation::kClampedGlu;
  if (clamps && (at > limit || (!of_gate && at < -limit))) return 0;
  const auto f = [&](double shift) {
    // The function that is not clamped in the variable that moves.
    ExpertsProblem free = p;
    if (clamps) free.limit = 1e30f;
    const double g = clamps ? std::fmin(gate, limit) : gate;
    const double u = clamps ? std::fmax(-limit, std::fmin(up, limit)) : up;
    return of_gate ? exact_activation(free, g + shift, u) : exact_activation(free, g, u + shift);
  };
  if (p.activation == ExpertsActivation::kReluSquare) return gate > 0 ? 2 * gate : 0;
  constexpr double kStep = 1e-3;
  return (8 * (f(kStep) - f(-kStep)) - (f(2 * kStep) - f(-2 * kStep))) / (12 * kStep);
}

}  // namespace monograph
