// The model of a run: loss and gradient of a micro-batch.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "monograph/train/layer.h"

namespace monograph::train {

class LanguageModel {
 public:
  // Both must outlive it. recompute: layers are computed again in the backward, and keep nothing
  // but their input in between; the bits are the same.
  LanguageModel(const BaseModel& base, const LoraParameters& parameters, bool recompute);

  // The factors of this step, rounded.
  void round_factors(std::span<const float> parameters, const Workers& workers);

  // The loss of the targets over `targets`, those of the whole step; the gradient of the parameters
  // is written to `gradient`, unless it is empty.
  float loss(const Batch& batch, double targets, const Dropout& dropout, std::span<float> gradient,
             const Workers& workers);

 private:
  // Of a micro-batch of so many tokens.
  struct Room {
    Room(const BaseModel& base, std::size_t tokens, bool all);
    std::vector<Activations> h;   // the input of each layer, and the output of the last
    std::vector<LayerKept> kept;  // of each layer, or of one after the other
    LayerRoom backward;
    Activations normed, dnormed, dh;
    std::vector<float> losses, lse;
  };
  float head(const Batch& batch, double targets, Room& room, bool gradient, const Workers& workers);

  const BaseModel& base_;
  bool recompute_;
  std::vector<Layer> layers_;
  std::size_t tokens_ = 0;
  std::optional<Room> room_;
};

}  // namespace monograph::train
