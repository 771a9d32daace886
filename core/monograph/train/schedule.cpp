#include "monograph/train/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <numeric>
#include <string_view>

namespace monograph::train {
namespace {

constexpr std::array<std::string_view, 8> kNames = {
    "cosine",       "linear", "constant", "constant_with_warmup",
    "inverse_sqrt", "rex",    "wsd",      "warmup_stable_decay"};

std::size_t warmup_steps(const ScheduleSettings& s, std::size_t total) {
  if (s.warmup_steps && *s.warmup_steps >= 1) return static_cast<std::size_t>(*s.warmup_steps);
  // As Python's `or`: 0 counts as missing.
  double share = s.warmup_ratio.value_or(0);
  if (share == 0) share = s.warmup_steps.value_or(0);
  return static_cast<std::size_t>(std::ceil(share * static_cast<double>(total)));
}

double half_cosine(double progress) { return 0.5 * (1.0 + std::cos(std::numbers::pi * progress)); }

// The share of the peak after the warm-up.
double decayed(const ScheduleSettings& s, double step, double warmup, double total) {
  const double progress = (step - warmup) / std::max(1.0, total - warmup);
  const double least = s.least.value_or(0);
  if (s.name == "linear") return 1.0 - progress;
  if (s.name == "rex") {
    const double left = 1.0 - progress;
    return least + (1.0 - least) * left / (0.1 + 0.9 * left);
  }
  if (s.name == "inverse_sqrt") {
    const double scale = warmup == 0 ? 10000 : warmup;
    return 1.0 / std::sqrt((step + scale - warmup) / scale);
  }
  if (s.name == "wsd" || s.name == "warmup_stable_decay") {
    const double decay = std::ceil(total / 10);
    return half_cosine(std::max(0.0, (step - (total - decay)) / decay));
  }
  // As Python writes it: another grouping would be another rounding.
  return least + (1.0 - least) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

}  // namespace

bool is_schedule(const std::string& name) {
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

double learning_rate(const ScheduleSettings& s, std::size_t step, std::size_t total) {
  const std::size_t warmup = s.name == "constant" ? 0 : warmup_steps(s, total);
  const auto number = [](std::size_t count) { return static_cast<double>(count); };
  if (step < warmup) return s.learning_rate * number(step + 1) / number(warmup);
  if (s.name.starts_with("constant")) return s.learning_rate;
  return s.learning_rate * decayed(s, number(step), number(warmup), number(total));
}

std::size_t Epochs::total() const {
  return std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
}

Epochs::Place Epochs::place(std::size_t step) const {
  std::size_t epoch = 0;
  while (epoch < lengths.size() && step >= lengths[epoch]) step -= lengths[epoch++];
  return {epoch, step};
}

double Epochs::share(std::size_t step) const {
  const std::size_t whole = total();
  const Place at = place(std::min(step, whole - 1));
  const std::size_t length = at.epoch + 1 == lengths.size() ? last_whole : lengths[at.epoch];
  return static_cast<double>(at.epoch) +
         static_cast<double>(at.step + (step >= whole ? 1 : 0)) / static_cast<double>(length);
}

std::set<std::size_t> event_steps(const Epochs& epochs, std::size_t per_epoch, double every) {
  std::set<std::size_t> found;
  const auto rounded = [](double value) {
    // To even where two are equally near, as Python rounds.
    return std::max<std::size_t>(1, static_cast<std::size_t>(std::nearbyint(value)));
  };
  if (per_epoch == 0 && every > 0) {
    const std::size_t distance = every >= 1 ? static_cast<std::size_t>(every)
                                            : rounded(every * static_cast<double>(epochs.total()));
    for (std::size_t step = distance; step <= epochs.total(); step += distance) found.insert(step);
    return found;
  }
  std::size_t begin = 0;
  for (const std::size_t length : epochs.lengths) {
    for (std::size_t turn = 1; turn <= per_epoch; ++turn)
      found.insert(begin +
                   rounded(static_cast<double>(length * turn) / static_cast<double>(per_epoch)));
    begin += length;
  }
  return found;
}

}  // namespace monograph::train
