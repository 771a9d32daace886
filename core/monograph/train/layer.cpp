#include "monograph/train/layer.h"

#include "monograph/kernels/gated_activation/gated_activation.h"
#include "monograph/train/norm.h"

namespace monograph::train {
namespace {

enum Place : std::size_t { kQuery, kKey, kValue, kOut, kGate, kUp, kDown };

Projection projection_of(const BaseProjection& base, const LoraParameters& parameters) {
  Projection projection;
  projection.weight = base.weight;
  projection.bias = base.bias;
  projection.lora = parameters.find(base.module);
  return projection;
}

// Nothing, if all layers have experts.
std::size_t inner_of(const BaseModel& model) {
  return model.config().has_mlp() ? model.config().inner : 0;
}

}  // namespace

LayerKept::LayerKept(const BaseModel& model, std::size_t tokens)
    : input(model.dtype(), tokens, model.config().width),
      attention(model, tokens),
      attended(model.dtype(), tokens, model.config().width),
      sum(model.dtype(), tokens, model.config().width),
      middle_input(model.dtype(), tokens, model.config().width),
      gate(model.dtype(), tokens, inner_of(model)),
      up(model.dtype(), tokens, inner_of(model)),
      middle(model.dtype(), tokens, inner_of(model)),
      output(model.dtype(), tokens, model.config().branch_norms ? model.config().width : 0),
      mixture(model, tokens),
      low(kDown + 1) {}

LayerRoom::LayerRoom(const BaseModel& model, std::size_t tokens)
    : mixture(model, tokens),
      dmiddle(model.dtype(), tokens, inner_of(model)),
      dgate(model.dtype(), tokens, inner_of(model)),
      dup(model.dtype(), tokens, inner_of(model)),
      dinput(model.dtype(), tokens, model.config().width),
      part(model.dtype(), tokens, model.config().width),
      dsum(model.dtype(), tokens, model.config().width),
      dout(model.dtype(), tokens, model.config().query_width()),
      dquery(model.dtype(), tokens, model.config().query_width()),
      dkey(model.dtype(), tokens, model.config().key_width()),
      dvalue(model.dtype(), tokens, model.config().key_width()) {}

Layer::Layer(const BaseModel& model, const LoraParameters& parameters, std::size_t number)
    : model_(model), number_(number) {
  const BaseLayer& base = model.layers()[number];
  query_ = projection_of(base.query, parameters);
  key_ = projection_of(base.key, parameters);
  value_ = projection_of(base.value, parameters);
  out_ = projection_of(base.out, parameters);
  if (has_experts()) return;
  gate_ = projection_of(base.gate, parameters);
  up_ = projection_of(base.up, parameters);
  down_ = projection_of(base.down, parameters);
}

void Layer::round_factors(std::span<const float> parameters, const Workers& workers) {
  for (Projection* const projection : {&query_, &key_, &value_, &out_, &gate_, &up_, &down_})
    projection->round_factors(model_.dtype(), parameters, workers);
}

// One room serves layers of other ranks.
void Layer::fit(LayerKept& kept) const {
  const Projection* const projections[] = {&query_, &key_, &value_, &out_, &gate_, &up_, &down_};
  for (std::size_t i = 0; i <= kDown; ++i)
    if (kept.low[i].cols() != projections[i]->rank())
      kept.low[i] = Activations(model_.dtype(), kept.input.rows(), projections[i]->rank());
}

void Layer::forward(const Activations& h, const Batch& batch, const Angles& angles, LayerKept& kept,
                    Activations* next, const Dropout& dropout, const Workers& workers,
                    KeyValues* past) const {
  const BaseLayer& base = model_.layers()[number_];
  const ModelConfig& config = model_.config();
  fit(kept);
  normalise(config, h, nullptr, base.input_norm, nullptr, kept.input, workers);
  AttentionKept& a = kept.attention;
  const Product from_input[] = {{&query_, &kept.low[kQuery], &a.query},
                                {&key_, &kept.low[kKey], &a.key},
                                {&value_, &kept.low[kValue], &a.value}};
  project(kept.input, from_input, dropout, workers);
  Attention(model_, number_, batch, angles, past).forward(a, workers);
  const Product to_stream[] = {{&out_, &kept.low[kOut], &kept.attended}};
  project(a.out, to_stream, dropout, workers);
  Activations* branch = &kept.attended;
  if (config.branch_norms) {
    branch = &kept.output;  // not needed yet
    normalise(config, kept.attended, nullptr, base.attended_norm, nullptr, *branch, workers);
  }
  normalise(config, *branch, &h, base.middle_norm, &kept.sum, kept.middle_input, workers);
  forward_mlp(kept, next, dropout, workers);
}

void Layer::forward_mlp(LayerKept& kept, Activations* next, const Dropout& dropout,
                        const Workers& workers) const {
  const BaseLayer& base = model_.layers()[number_];
  const ModelConfig& config = model_.config();
  const Activations& z = kept.middle_input;
  if (has_experts()) {
    Mixture(config.experts, base.experts).forward(z, kept.mixture, next, workers);
    if (next != nullptr) add(*next, kept.sum, workers);
    return;
  }
  const Product to_middle[] = {{&gate_, &kept.low[kGate], &kept.gate},
                               {&up_, &kept.low[kUp], &kept.up}};
  project(z, to_middle, dropout, workers);
  gated_activation({z.dtype(), config.activation, z.rows(), config.inner, kept.gate.data(),
                    kept.up.data(), config.inner, config.inner, kept.middle.data()},
                   workers.parallel_for);
  const Product from_middle[] = {
      {&down_, &kept.low[kDown], config.branch_norms ? &kept.output : next}};
  project(kept.middle, from_middle, dropout, workers);
  if (next == nullptr) return;
  if (config.branch_norms)
    normalise(config, kept.output, nullptr, base.output_norm, nullptr, *next, workers);
  add(*next, kept.sum, workers);
}

void Layer::backward_mlp(const LayerKept& kept, const Activations& dh, LayerRoom& room,
                         const Dropout& dropout, std::span<float> gradient,
                         const Workers& workers) const {
  const BaseLayer& base = model_.layers()[number_];
  const ModelConfig& config = model_.config();
  if (has_experts())
    return Mixture(config.experts, base.experts)
        .backward(kept.middle_input, kept.mixture, dh, room.dinput, room.part, room.mixture,
                  workers);
  const auto back = [&](const Projection& projection, Place place, const Activations& x,
                        const Activations& dy, GradientSum* dx) {
    project_backward(projection, x, kept.low[place], dy, dx, dropout, gradient, workers);
  };
  const Activations* doutput = &dh;
  if (config.branch_norms) {
    norm_gradient(config, dh, nullptr, kept.output, base.output_norm, room.dinput, workers);
    doutput = &room.dinput;
  }
  // The gate's gradients are not needed yet.
  GradientSum dmiddle(room.dmiddle, room.dgate);
  back(down_, kDown, kept.middle, *doutput, &dmiddle);
  gated_activation_backward({dh.dtype(), config.activation, dh.rows(), config.inner,
                             room.dmiddle.data(), kept.gate.data(), kept.up.data(), config.inner,
                             config.inner, config.inner, room.dgate.data(), room.dup.data()},
                            workers.parallel_for);
  GradientSum dmiddle_input(room.dinput, room.part);
  back(up_, kUp, kept.middle_input, room.dup, &dmiddle_input);
  back(gate_, kGate, kept.middle_input, room.dgate, &dmiddle_input);
}

void Layer::backward(const Activations& h, const Batch& batch, const Angles& angles,
                     const LayerKept& kept, Activations& dh, LayerRoom& room,
                     const Dropout& dropout, std::span<float> gradient,
                     const Workers& workers) const {
  const BaseLayer& base = model_.layers()[number_];
  const ModelConfig& config = model_.config();
  const auto back = [&](const Projection& projection, Place place, const Activations& x,
                        const Activations& dy, GradientSum* dx) {
    project_backward(projection, x, kept.low[place], dy, dx, dropout, gradient, workers);
  };
  backward_mlp(kept, dh, room, dropout, gradient, workers);
  norm_gradient(config, room.dinput, &dh, kept.sum, base.middle_norm, room.dsum, workers);
  const Activations* dattended = &room.dsum;
  if (config.branch_norms) {
    norm_gradient(config, room.dsum, nullptr, kept.attended, base.attended_norm, room.part,
                  workers);
    dattended = &room.part;
  }
  GradientSum dout(room.dout, room.dquery);
  back(out_, kOut, kept.attention.out, *dattended, &dout);
  Attention(model_, number_, batch, angles)
      .backward(kept.attention, room.dout, room.dquery, room.dkey, room.dvalue, workers);
  GradientSum dinput(room.dinput, room.part);
  GradientSum* const wanted = number_ == 0 ? nullptr : &dinput;
  back(value_, kValue, kept.input, room.dvalue, wanted);
  back(key_, kKey, kept.input, room.dkey, wanted);
  back(query_, kQuery, kept.input, room.dquery, wanted);
  if (number_ == 0) return;
  norm_gradient(config, room.dinput, nullptr, h, base.input_norm, dh, workers);
  add(dh, room.dsum, workers);
}

}  // namespace monograph::train
