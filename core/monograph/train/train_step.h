// One optimiser step over the micro-batches, with the bits of monograph.training.TrainStep: the
// loss is the sum over all targets of the step divided by their number; gradients of micro-batches
// are summed in a tree, clipped by their norm and given to AdamW.
#pragma once

#include <span>

#include "monograph/train/language_model.h"
#include "monograph/train/tree_sum.h"

namespace monograph::train {

struct StepSettings {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  double max_grad_norm = 1;  // 0 or less: nothing is clipped
  double dropout = 0;
  std::uint64_t seed = 0;
  std::size_t leaves = 0;  // of the tree; 0: one for each micro-batch
  bool recompute = true;
};

struct StepResult {
  float loss, grad_norm;  // the norm before clipping
  std::size_t targets;
};

class TrainStep {
 public:
  // `base` and `parameters` must outlive it. Throws Error if the base cannot be trained with the
  // bits of the Python step (check_base_of), or the settings make no sense.
  TrainStep(const BaseModel& base, LoraParameters& parameters, const StepSettings& settings,
            const Workers& workers);

  // A loss or norm that is not finite changes nothing; a step without targets neither, and both of
  // its numbers are 0.
  StepResult operator()(std::span<const Batch> micro_batches, double learning_rate);

  // The loss over the targets of a batch, summed.
  float evaluate(const Batch& batch);

 private:
  std::uint64_t seed_of(std::size_t micro_batch) const;
  float update(std::span<const float> gradient, double learning_rate);

  LoraParameters& parameters_;
  StepSettings settings_;
  Workers workers_;
  LanguageModel model_;
};

}  // namespace monograph::train
