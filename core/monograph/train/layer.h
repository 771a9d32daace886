// A decoder layer, forward and backward:
//   x = norm(h),  o = attention(q(x), k(x), v(x))
//   s = h + out(o),  z = norm(s)
//   h' = s + down(act(gate(z)) up(z))
// A layer with experts has them in the place of the MLP: mixture.h.
// With norms behind the branches (Gemma 3) norm(out(o)) and norm(down(..)) are what is added.
// Sums and roundings are those of the Python step: s is part of the second norm's kernel, h' is one
// rounded sum; the gradient of x is that of v, plus that of k, plus that of q, rounded after each.
#pragma once

#include <span>

#include "monograph/train/attention.h"
#include "monograph/train/lora_parameters.h"
#include "monograph/train/mixture.h"
#include "monograph/train/projection.h"

namespace monograph::train {

// What the forward of a layer leaves for its backward.
struct LayerKept {
  LayerKept(const BaseModel& model, std::size_t tokens);
  Activations input;  // x
  AttentionKept attention;
  Activations attended, sum, middle_input;  // out(o), s, z
  Activations gate, up, middle;             // and act(gate) up
  Activations output;                       // down(..), empty without a norm behind it
  MixtureKept mixture;                      // of a layer with experts
  // u of the seven projections, in their order; made by the forward, for ranks are of a layer.
  std::vector<Activations> low;
};

// Buffers of a backward, for one layer after the other.
struct LayerRoom {
  LayerRoom(const BaseModel& model, std::size_t tokens);
  MixtureRoom mixture;
  Activations dmiddle, dgate, dup, dinput, part, dsum, dout, dquery, dkey, dvalue;
};

class Layer {
 public:
  Layer(const BaseModel& model, const LoraParameters& parameters, std::size_t number);

  void round_factors(std::span<const float> parameters, const Workers& workers);

  // h' of h. Nullptr for h': a recomputation of what the backward reads. With a past the batch goes
  // on behind it.
  void forward(const Activations& h, const Batch& batch, const Angles& angles, LayerKept& kept,
               Activations* next, const Dropout& dropout, const Workers& workers,
               KeyValues* past = nullptr) const;
  // dh, the gradient of h', becomes that of h, unless the layer is the first, below which nothing
  // is trained. The gradients of the factors go to `gradient`.
  void backward(const Activations& h, const Batch& batch, const Angles& angles,
                const LayerKept& kept, Activations& dh, LayerRoom& room, const Dropout& dropout,
                std::span<float> gradient, const Workers& workers) const;

 private:
  void fit(LayerKept& kept) const;
  bool has_experts() const { return model_.config().has_experts(number_); }
  // s + mlp(z), of kept.middle_input.
  void forward_mlp(LayerKept& kept, Activations* next, const Dropout& dropout,
                   const Workers& workers) const;
  // The gradient of z into room.dinput.
  void backward_mlp(const LayerKept& kept, const Activations& dh, LayerRoom& room,
                    const Dropout& dropout, std::span<float> gradient,
                    const Workers& workers) const;

  const BaseModel& model_;
  std::size_t number_;
  Projection query_, key_, value_, out_, gate_, up_, down_;
};

}  // namespace monograph::train
