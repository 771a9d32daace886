// Numbers that depend on the step alone: the learning rate, and the epochs of a run.
#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace monograph::train {

struct ScheduleSettings {
  double learning_rate = 2e-4;  // at its peak
  // cosine, linear, constant, constant_with_warmup, inverse_sqrt, rex, wsd, warmup_stable_decay
  std::string name = "cosine";
  std::optional<double> least;  // the share of the peak that cosine and rex end at; 0 if missing
  std::optional<double> warmup_steps, warmup_ratio;  // steps below 1 are a share
};

bool is_schedule(const std::string& name);

// The rate of step 0 ... total - 1. A warm-up of W steps rises 1/W, 2/W, ... 1.
double learning_rate(const ScheduleSettings& settings, std::size_t step, std::size_t total);

// Steps of a run: lengths[e] in epoch e, the last perhaps cut from last_whole.
struct Epochs {
  std::vector<std::size_t> lengths;
  std::size_t last_whole = 0;

  std::size_t total() const;
  struct Place {
    std::size_t epoch, step;
  };
  Place place(std::size_t step) const;
  // Epochs done after `step` steps.
  double share(std::size_t step) const;
};

// Numbers of steps done after which something happens: so many times an epoch, or every so many
// steps, below 1 a share of all.
std::set<std::size_t> event_steps(const Epochs& epochs, std::size_t per_epoch, double every);

}  // namespace monograph::train
