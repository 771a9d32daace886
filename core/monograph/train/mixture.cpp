#include "monograph/train/mixture.h"

#include "monograph/kernels/experts/choose.h"
#include "monograph/kernels/linear/linear.h"

namespace monograph::train {
namespace {

ChooseExperts choice(const ExpertsConfig& config, const MixtureKept& kept) {
  return {kept.logits.dtype(), kept.logits.in(), config.slots, config.normalise};
}

}  // namespace

MixtureKept::MixtureKept(const BaseModel& model, std::size_t tokens)
    : logits(model.dtype(), tokens, model.config().experts.count),
      weights(model.dtype(), tokens, model.config().experts.slots),
      ids(tokens * model.config().experts.slots) {}

MixtureRoom::MixtureRoom(const BaseModel& model, std::size_t tokens)
    : dlogits(model.dtype(), tokens, model.config().experts.count),
      dweights(model.dtype(), tokens, model.config().experts.slots) {}

ExpertsProblem Mixture::problem(const Activations& z, const MixtureKept& kept) const {
  const std::size_t width = z.cols();
  ExpertsProblem problem;
  problem.dtype = problem.weights_dtype = z.dtype();
  problem.experts = config_.count;
  problem.tokens = z.rows();
  problem.slots = config_.slots;
  problem.x = z.in();
  problem.ids = kept.ids.data();
  problem.weights = kept.weights.data();
  problem.up.weight = experts_.up;
  problem.up.in = width;
  problem.up.out = 2 * config_.inner;
  problem.down.weight = experts_.down;
  problem.down.in = config_.inner;
  problem.down.out = width;
  return problem;
}

void Mixture::forward(const Activations& z, MixtureKept& kept, Activations* y,
                      const Workers& workers) const {
  const LinearOutput logits = {experts_.router, {}, nullptr, kept.logits.out()};
  linear(z.dtype(), z.in(), {&logits, 1}, workers.parallel_for);
  choose_experts(choice(config_, kept), kept.ids.data(), kept.weights.data(), workers.parallel_for);
  if (y != nullptr) experts(problem(z, kept), y->data(), nullptr, workers.parallel_for);
}

void Mixture::backward(const Activations& z, const MixtureKept& kept, const Activations& dy,
                       Activations& dz, Activations& part, MixtureRoom& room,
                       const Workers& workers) const {
  ExpertsGradients gradients;
  gradients.dx = dz.data();
  gradients.dweights = room.dweights.data();
  experts_backward(problem(z, kept), dy.in(), nullptr, gradients, workers.parallel_for);
  choose_experts_backward(choice(config_, kept), kept.ids.data(), room.dweights.data(),
                          room.dlogits.data(), workers.parallel_for);
  const LinearTerm of_logits = {room.dlogits.in(), experts_.router};
  linear_dx(z.dtype(), {&of_logits, 1}, part.out(), workers.parallel_for);
  add(dz, part, workers);
}

}  // namespace monograph::train
