#include "monograph/kernels/experts/layer.h"

#include <algorithm>
#include <cstring>

#include "monograph/kernels/experts/factors.h"

namespace monograph {
namespace {

// A strip is a multiple of every panel.
constexpr std::size_t kStripCols = 256, kStripBytes = std::size_t{32} << 20;

}  // namespace

ExpertsLayer::ExpertsLayer(const ExpertsProblem& given, ParallelFor threads)
    : problem(given),
      parallel_for(threads),
      routing(sort_slots(given)),
      kernels(pick_experts(given.dtype)),
      up(problem, problem.up, routing, parallel_for),
      down(problem, problem.down, routing, parallel_for),
      slot_weights(given.weights == nullptr ? 0 : given.all_slots()),
      place_weights(given.weights == nullptr ? 0 : routing.kept()) {
  if (given.weights == nullptr) return;
  convert(given.weights, given.weights_dtype, given.all_slots(), slot_weights.data(),
          DType::kFloat32);
  for (std::size_t i = 0; i < kept(); ++i) place_weights[i] = slot_weights[routing.slots[i]];
}

void ExpertsLayer::compute_pre(const Buffer& u1, void* pre) const {
  const std::size_t width = problem.up.out;
  up.forward(x(), u1, 0, {pre, kept(), width, width});
}

ActivationJob ExpertsLayer::activation_of(const void* pre, std::size_t place) const {
  const auto* rows = static_cast<const std::byte*>(pre);
  return {problem.activation,
          problem.interleaved,
          problem.alpha,
          problem.limit,
          inner(),
          rows + place * problem.up.out * element(),
          nullptr,
          nullptr,
          nullptr,
          1};
}

Buffer ExpertsLayer::activate(const void* pre) const {
  Buffer h = places_by(inner());
  each_rows(kept(), inner(), parallel_for, [&](std::size_t begin, std::size_t end) {
    for (std::size_t place = begin; place < end; ++place) {
      ActivationJob job = activation_of(pre, place);
      job.h = h.data() + place * inner() * element();
      kernels.activate(job);
    }
  });
  return h;
}

void ExpertsLayer::activate_back(const void* pre, const Buffer& dh, void* dpre, float* dots,
                                 bool keep_h) const {
  each_rows(kept(), 2 * inner(), parallel_for, [&](std::size_t begin, std::size_t end) {
    for (std::size_t place = begin; place < end; ++place) {
      ActivationJob job = activation_of(pre, place);
      job.weight = place_weights[place];
      job.dh = dh.data() + place * inner() * element();
      if (keep_h) job.h = dh.data() + place * inner() * element();
      if (dpre != nullptr)
        job.dpre = static_cast<std::byte*>(dpre) + place * problem.up.out * element();
      const float dot = kernels.activate_back(job);
      if (dots != nullptr) dots[place] = dot;
    }
  });
}

void ExpertsLayer::sum_slots(std::size_t width, const float* factors, void* out,
                             FunctionRef<void(std::size_t, const MutableMatrix&)> compute) const {
  const std::size_t budget = kStripBytes + kept() * problem.up.out * element() / 2;
  const std::size_t fitting = budget / (std::max<std::size_t>(kept(), 1) * element());
  const std::size_t strip =
      std::min(width, std::max(fitting / kStripCols, std::size_t{1}) * kStripCols);
  const Buffer rows = places_by(strip);
  for (std::size_t first = 0; first < width; first += strip) {
    const std::size_t cols = std::min(strip, width - first);
    compute(first, {rows.data(), kept(), cols, cols});
    each_rows(
        problem.tokens, cols * problem.slots, parallel_for,
        [&](std::size_t begin, std::size_t end) {
          for (std::size_t token = begin; token < end; ++token) {
            const std::size_t slot = token * problem.slots;
            kernels.sum_slots({rows.data(), cols, cols, routing.places.data() + slot,
                               factors == nullptr ? nullptr : factors + slot, problem.slots,
                               static_cast<std::byte*>(out) + (token * width + first) * element()});
          }
        });
  }
}

}  // namespace monograph
