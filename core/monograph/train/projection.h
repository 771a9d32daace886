// A linear layer of the frozen base with a trained LoRA, forward and backward:
//   a = round(s A), b = round(B)         the factors in the type of the model, once a step
//   u = x a^T                            with dropout: u = drop(x) a^T
//   y = x W^T + u b^T + bias             one pass over W
//   du = dy b
//   dx = dy W + du a                     one pass over W; with dropout two parts: dy W, drop'(du a)
//   dB = dy^T u, dA = s du^T x           each rounded to the type of the model, as b and a are
// The order of sums and every rounding are those of monograph::linear under autograd.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "monograph/train/activations.h"

namespace monograph::train {

// Where the LoRA of a projection lies in the flat parameters, and what it is.
struct LoraPlace {
  std::string module;  // "model.layers.0.self_attn.q_proj"
  std::size_t rank = 0, inputs = 0, outputs = 0;
  double scaling = 0;        // alpha / rank
  std::size_t a = 0, b = 0;  // first elements of A [rank, inputs] and of B [outputs, rank]
  std::uint64_t stream = 0;  // of its dropout masks: its number among all
};

struct Projection {
  LinearWeight weight;
  const void* bias = nullptr;  // [outputs] in the type of the model
  const LoraPlace* lora = nullptr;
  Activations a, b;  // of this step

  std::size_t rank() const { return lora == nullptr ? 0 : lora->rank; }
  void round_factors(DType dtype, std::span<const float> parameters, const Workers& workers);
};

struct Dropout {
  double probability = 0;
  std::uint64_t seed = 0;  // of the micro-batch
};

// y is not computed if it is nullptr: a recomputation wants what the backward reads alone.
struct Product {
  const Projection* projection;
  Activations* u;  // [tokens, rank]
  Activations* y;
};

// Several projections of one x, which is packed once for all.
void project(const Activations& x, std::span<const Product> products, const Dropout& dropout,
             const Workers& workers);

// The gradient of an activation that several operators read: the first part is written, each later
// one added and rounded, in the order in which they come.
class GradientSum {
 public:
  // `room` is a second one of the same shape.
  GradientSum(Activations& sum, Activations& room) : sum_(sum), room_(room) {}
  Activations& next() { return empty_ ? sum_ : room_; }
  void take(const Workers& workers);

 private:
  Activations &sum_, &room_;
  bool empty_ = true;
};

// The gradients of A and B into `gradient`, laid out as the flat parameters, and the parts of dx.
void project_backward(const Projection& projection, const Activations& x, const Activations& u,
                      const Activations& dy, GradientSum* dx, const Dropout& dropout,
                      std::span<float> gradient, const Workers& workers);

}  // namespace monograph::train
