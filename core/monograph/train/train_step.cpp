#include "monograph/train/train_step.h"

#include <cmath>
#include <limits>

#include "monograph/base/error.h"
#include "monograph/kernels/adamw/adamw.h"

namespace monograph::train {
namespace {

// Beyond them seeds of dropout would be those of the next step.
constexpr std::size_t kMostMicroBatches = 4096;
constexpr std::uint64_t kSeedFactor = 0x9E3779B1;
constexpr std::uint64_t kPositive = (std::uint64_t{1} << 63) - 1;
constexpr std::size_t kLargestRankWithDropout = 256;  // beyond it Python's dA is torch's product

void check(const StepSettings& s, const LoraParameters& parameters) {
  const auto fraction = [](double x) { return x >= 0 && x < 1; };
  if (!fraction(s.beta1) || !fraction(s.beta2))
    throw Error("betas are " + std::to_string(s.beta1) + " and " + std::to_string(s.beta2) +
                ", wanted 0 to below 1");
  if (!(s.eps >= 0) || !(s.weight_decay >= 0) || std::isnan(s.max_grad_norm))
    throw Error("eps, weight_decay or max_grad_norm is negative or no number, wanted 0 or more");
  if (!fraction(s.dropout))
    throw Error("dropout is " + std::to_string(s.dropout) + ", wanted 0 to below 1");
  for (const LoraPlace& place : parameters.places)
    if (s.dropout > 0 && place.rank > kLargestRankWithDropout)
      throw Error(place.module + " has rank " + std::to_string(place.rank) + ", wanted at most " +
                  std::to_string(kLargestRankWithDropout) + " with dropout");
}

}  // namespace

TrainStep::TrainStep(const BaseModel& base, LoraParameters& parameters,
                     const StepSettings& settings, const Workers& workers)
    : parameters_(parameters),
      settings_(settings),
      workers_(workers),
      model_(base, parameters, settings.recompute) {
  check(settings, parameters);
  check_base_of(parameters, base);
}

// (seed * 0x9E3779B1 + steps) * kMostMicroBatches + micro_batch, modulo 2^63
std::uint64_t TrainStep::seed_of(std::size_t micro_batch) const {
  const auto steps = static_cast<std::uint64_t>(parameters_.steps);
  const std::uint64_t mixed = settings_.seed * kSeedFactor + steps;
  return (mixed * kMostMicroBatches + micro_batch) & kPositive;
}

StepResult TrainStep::operator()(std::span<const Batch> micro_batches, double learning_rate) {
  if (micro_batches.empty() || micro_batches.size() > kMostMicroBatches)
    throw Error("a step of " + std::to_string(micro_batches.size()) +
                " micro-batches, wanted 1 to " + std::to_string(kMostMicroBatches));
  std::size_t targets = 0;
  for (const Batch& batch : micro_batches) targets += batch.count_targets();
  if (targets == 0) return {0, 0, 0};
  model_.round_factors(parameters_.values, workers_);
  const std::size_t size = parameters_.values.size();
  const auto part = [&](std::size_t index) {
    // The gradient, and behind it the loss.
    std::vector<float> found(size + 1);
    found[size] = model_.loss(micro_batches[index], static_cast<float>(targets),
                              {settings_.dropout, seed_of(index)}, {found.data(), size}, workers_);
    return found;
  };
  const std::size_t leaves = settings_.leaves == 0 ? micro_batches.size() : settings_.leaves;
  std::vector<float> sum = tree_sum(micro_batches.size(), leaves, part, workers_);
  const float loss = sum[size];
  // A loss that is not finite may have a gradient that is; such a step is skipped too.
  if (!std::isfinite(loss)) sum[0] = std::numeric_limits<float>::quiet_NaN();
  const float norm = update({sum.data(), size}, learning_rate);
  return {loss, norm, targets};
}

float TrainStep::update(std::span<const float> gradient, double learning_rate) {
  LoraParameters& p = parameters_;
  AdamwTensor tensor = {gradient.size(),        DType::kFloat32,
                        gradient.data(),        p.values.data(),
                        p.exp_avg.data(),       p.exp_avg_sq.data(),
                        settings_.weight_decay, static_cast<double>(p.steps) + 1};
  const float norm = static_cast<float>(gradient_norm({&tensor, 1}, workers_.parallel_for));
  if (!std::isfinite(norm)) return norm;
  p.steps += 1;
  // The rate is a float32 number in the graph.
  const double rate = static_cast<float>(learning_rate);
  const double most = settings_.max_grad_norm;
  const bool clips = most > 0 && norm > most;
  adamw({&tensor, 1},
        {rate, settings_.beta1, settings_.beta2, settings_.eps,
         clips ? static_cast<float>(most / norm) : 1.0f},
        workers_.parallel_for);
  return norm;
}

float TrainStep::evaluate(const Batch& batch) {
  model_.round_factors(parameters_.values, workers_);
  return model_.loss(batch, 1, {}, {}, workers_);
}

}  // namespace monograph::train
