#include "monograph/train/language_model.h"

#include "monograph/kernels/linear_cross_entropy/linear_cross_entropy.h"
#include "monograph/train/norm.h"

namespace monograph::train {

LanguageModel::Room::Room(const BaseModel& base, std::size_t tokens, bool all)
    : backward(base, tokens),
      normed(base.dtype(), tokens, base.config().width),
      dnormed(base.dtype(), tokens, base.config().width),
      dh(base.dtype(), tokens, base.config().width),
      losses(tokens),
      lse(tokens) {
  const std::size_t layers = base.config().layers;
  for (std::size_t i = 0; i <= layers; ++i)
    h.emplace_back(base.dtype(), tokens, base.config().width);
  for (std::size_t i = 0; i < (all ? layers : 1); ++i) kept.emplace_back(base, tokens);
}

LanguageModel::LanguageModel(const BaseModel& base, const LoraParameters& parameters,
                             bool recompute)
    : base_(base), recompute_(recompute) {
  for (std::size_t i = 0; i < base.config().layers; ++i) layers_.emplace_back(base, parameters, i);
}

void LanguageModel::round_factors(std::span<const float> parameters, const Workers& workers) {
  for (Layer& layer : layers_) layer.round_factors(parameters, workers);
}

float LanguageModel::loss(const Batch& batch, double targets, const Dropout& dropout,
                          std::span<float> gradient, const Workers& workers) {
  const std::size_t tokens = batch.tokens(), layers = layers_.size();
  if (tokens_ != tokens) {
    room_.reset();
    room_.emplace(base_, tokens, !recompute_);
    tokens_ = tokens;
  }
  Room& room = *room_;
  const Angles angles(base_, batch, workers);
  base_.embed(batch.ids, room.h[0].data());
  const auto kept = [&](std::size_t layer) -> LayerKept& {
    return room.kept[recompute_ ? 0 : layer];
  };
  for (std::size_t i = 0; i < layers; ++i)
    layers_[i].forward(room.h[i], batch, angles, kept(i), &room.h[i + 1], dropout, workers);
  const float loss = head(batch, targets, room, !gradient.empty(), workers);
  if (gradient.empty()) return loss;
  for (std::size_t i = layers; i-- > 0;) {
    if (recompute_)
      layers_[i].forward(room.h[i], batch, angles, kept(i), nullptr, dropout, workers);
    layers_[i].backward(room.h[i], batch, angles, kept(i), room.dh, room.backward, dropout,
                        gradient, workers);
  }
  return loss;
}

float LanguageModel::head(const Batch& batch, double targets, Room& room, bool gradient,
                          const Workers& workers) {
  const Activations& h = room.h.back();
  const std::vector<float>& gain = base_.final_norm();
  const DType dtype = base_.dtype();
  normalise(base_.config(), h, nullptr, gain, nullptr, room.normed, workers);
  CrossEntropyResult result = {room.losses.data(), room.lse.data(), {}};
  if (gradient) result.dx = room.dnormed.out();
  linear_cross_entropy(
      {dtype, room.normed.in(), base_.head(), nullptr, batch.targets.data(), LogitsMap{}}, result,
      workers.parallel_for);
  double sum = 0;
  for (const float loss : room.losses) sum += loss;
  if (gradient) {
    scale(room.dnormed, static_cast<float>(1.0 / targets), workers);
    norm_gradient(base_.config(), room.dnormed, nullptr, h, gain, room.dh, workers);
  }
  return static_cast<float>(sum / targets);
}

}  // namespace monograph::train
