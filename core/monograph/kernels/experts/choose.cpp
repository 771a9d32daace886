#include "monograph/kernels/experts/choose.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "monograph/base/float_types.h"

namespace monograph {
namespace {

constexpr std::size_t kGrain = 2048;  // exponentials that are worth a thread

// NaN stands before every number.
bool is_before(double a, double b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

// e^(z - largest), which p is in proportion to.
template <class T>
void exponentials(const T* logits, std::vector<double>& found) {
  for (std::size_t j = 0; j < found.size(); ++j)
    found[j] = static_cast<double>(to_float(logits[j]));
  const double largest = *std::max_element(found.begin(), found.end());
  for (double& value : found) value = std::exp(value - largest);
}

template <class T>
T rounded(double value) {
  return from_float<T>(static_cast<float>(value));
}

template <class T>
void choose(const T* logits, std::size_t experts, std::size_t slots, std::int64_t* ids) {
  std::vector<bool> taken(experts, false);
  for (std::size_t i = 0; i < slots; ++i) {
    std::size_t best = experts;
    for (std::size_t j = 0; j < experts; ++j)
      if (!taken[j] && (best == experts || is_before(static_cast<double>(to_float(logits[j])),
                                                     static_cast<double>(to_float(logits[best])))))
        best = j;
    taken[best] = true;
    ids[i] = static_cast<std::int64_t>(best);
  }
}

// p, or what is divided by the sum over the chosen alone.
void divide(std::vector<double>& found, const std::int64_t* ids, std::size_t slots,
            bool normalise) {
  double sum = 0;
  if (normalise) {
    for (std::size_t i = 0; i < slots; ++i)
      if (ids[i] >= 0 && static_cast<std::size_t>(ids[i]) < found.size())
        sum += found[static_cast<std::size_t>(ids[i])];
  } else {
    for (const double value : found) sum += value;
  }
  for (double& value : found) value /= sum;
}

template <class T>
const T* row_of(const ChooseExperts& problem, std::size_t token) {
  return static_cast<const T*>(problem.logits.data) + token * problem.logits.stride;
}

std::size_t grain_of(const ChooseExperts& problem) {
  return std::max<std::size_t>(kGrain / std::max<std::size_t>(problem.logits.cols, 1), 1);
}

template <class T>
void gradient_row(const ChooseExperts& problem, const T* logits, const std::int64_t* ids,
                  const T* dweights, T* dlogits, std::vector<double>& shares,
                  std::vector<double>& given) {
  exponentials(logits, shares);
  divide(shares, ids, problem.slots, problem.normalise);
  std::fill(given.begin(), given.end(), 0.0);
  std::vector<bool> chosen(shares.size(), false);
  double along = 0;
  for (std::size_t i = 0; i < problem.slots; ++i) {
    if (ids[i] < 0 || static_cast<std::size_t>(ids[i]) >= shares.size()) continue;
    const auto id = static_cast<std::size_t>(ids[i]);
    const double d = static_cast<double>(to_float(dweights[i]));
    chosen[id] = true;
    given[id] += d;
    along += d * shares[id];
  }
  for (std::size_t j = 0; j < shares.size(); ++j) {
    const bool takes = chosen[j] || !problem.normalise;
    dlogits[j] = rounded<T>(takes ? shares[j] * (given[j] - along) : 0.0);
  }
}

}  // namespace

void choose_experts(const ChooseExperts& problem, std::int64_t* ids, void* weights,
                    ParallelFor parallel_for) {
  const std::size_t slots = problem.slots;
  with_type(problem.dtype, [&]<class T>() {
    parallel_for(problem.logits.rows, grain_of(problem), [&](std::size_t begin, std::size_t end) {
      std::vector<double> shares(problem.logits.cols);
      for (std::size_t t = begin; t < end; ++t) {
        std::int64_t* const chosen = ids + t * slots;
        choose(row_of<T>(problem, t), shares.size(), slots, chosen);
        exponentials(row_of<T>(problem, t), shares);
        divide(shares, chosen, slots, problem.normalise);
        for (std::size_t i = 0; i < slots; ++i)
          static_cast<T*>(weights)[t * slots + i] =
              rounded<T>(shares[static_cast<std::size_t>(chosen[i])]);
      }
    });
  });
}

void choose_experts_backward(const ChooseExperts& problem, const std::int64_t* ids,
                             const void* dweights, void* dlogits, ParallelFor parallel_for) {
  const std::size_t slots = problem.slots, experts = problem.logits.cols;
  with_type(problem.dtype, [&]<class T>() {
    parallel_for(problem.logits.rows, grain_of(problem), [&](std::size_t begin, std::size_t end) {
      std::vector<double> shares(experts), given(experts);
      for (std::size_t t = begin; t < end; ++t)
        gradient_row(problem, row_of<T>(problem, t), ids + t * slots,
                     static_cast<const T*>(dweights) + t * slots,
                     static_cast<T*>(dlogits) + t * experts, shares, given);
    });
  });
}

}  // namespace monograph
