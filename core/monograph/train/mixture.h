// A mixture of frozen experts, forward and backward, by the kernels of the Python operators:
//   l = z router^T,  ids, w = the largest of softmax(l)      kernels/experts/choose.h
//   y = sum over the token's experts e of w down_e(silu(gate_e(z)) up_e(z))
//   dz = round(dz of the experts + round(dl router))
#pragma once

#include <cstdint>
#include <vector>

#include "monograph/kernels/experts/experts.h"
#include "monograph/train/activations.h"
#include "monograph/train/base_model.h"

namespace monograph::train {

// What the forward leaves for the backward; empty without experts.
struct MixtureKept {
  MixtureKept(const BaseModel& model, std::size_t tokens);
  Activations logits, weights;
  std::vector<std::int64_t> ids;
};

// Buffers of a backward.
struct MixtureRoom {
  MixtureRoom(const BaseModel& model, std::size_t tokens);
  Activations dlogits, dweights;
};

class Mixture {
 public:
  // `experts` must outlive it.
  Mixture(const ExpertsConfig& config, const BaseExperts& experts)
      : config_(config), experts_(experts) {}

  // y is not computed if it is nullptr: a recomputation wants what the backward reads alone.
  void forward(const Activations& z, MixtureKept& kept, Activations* y,
               const Workers& workers) const;
  // dz of dy. `part` is a room of its shape.
  void backward(const Activations& z, const MixtureKept& kept, const Activations& dy,
                Activations& dz, Activations& part, MixtureRoom& room,
                const Workers& workers) const;

 private:
  ExpertsProblem problem(const Activations& z, const MixtureKept& kept) const;

  const ExpertsConfig& config_;
  const BaseExperts& experts_;
};

}  // namespace monograph::train
