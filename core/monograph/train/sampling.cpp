#include "monograph/train/sampling.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/kernels/seeded_dropout/philox.h"

namespace monograph::train {
namespace {

struct Candidate {
  float logit;
  std::int64_t id;
  double p;
};

// Of a heap: the likeliest is at its front.
bool is_behind(const Candidate& one, const Candidate& other) {
  return one.logit != other.logit ? one.logit < other.logit : one.id > other.id;
}

void check(std::span<const float> logits, const Sampling& sampling) {
  if (!(sampling.temperature >= 0) || !std::isfinite(sampling.temperature))
    throw Error("temperature is " + std::to_string(sampling.temperature) + ", wanted 0 or more");
  if (!(sampling.top_p > 0 && sampling.top_p <= 1))
    throw Error("top_p is " + std::to_string(sampling.top_p) + ", wanted above 0, at most 1");
  if (logits.empty()) throw Error("there are no logits, wanted one or more");
  for (std::size_t i = 0; i < logits.size(); ++i)
    if (!std::isfinite(logits[i]))
      throw Error("the logit of token " + std::to_string(i) + " is " + std::to_string(logits[i]) +
                  ", wanted a finite number");
}

}  // namespace

double uniform(std::uint64_t seed, std::uint64_t position) {
  const PhiloxWords words = mask_words(seed, 0, position);
  const std::uint64_t bits = (std::uint64_t{words.word[0]} << 32 | words.word[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

std::int64_t choose_token(std::span<const float> logits, const Sampling& sampling,
                          std::uint64_t position) {
  check(logits, sampling);
  const auto largest = std::max_element(logits.begin(), logits.end());
  if (sampling.temperature == 0) return largest - logits.begin();
  std::vector<Candidate> heap;
  heap.reserve(logits.size());
  double all = 0;
  for (const float logit : logits) {
    const double below = static_cast<double>(logit) - static_cast<double>(*largest);
    heap.push_back(
        {logit, static_cast<std::int64_t>(heap.size()), std::exp(below / sampling.temperature)});
    all += heap.back().p;
  }
  std::make_heap(heap.begin(), heap.end(), is_behind);
  // pop_heap puts the kept at the end, the likeliest last.
  auto end = heap.end();
  double kept = 0;
  do {
    std::pop_heap(heap.begin(), end--, is_behind);
    kept += end->p;
  } while (end != heap.begin() && kept < sampling.top_p * all);
  const double wanted = uniform(sampling.seed, position) * kept;
  double sum = 0;
  for (auto one = heap.rbegin(); one.base() != end; ++one) {
    sum += one->p;
    if (sum > wanted) return one->id;
  }
  return end->id;
}

}  // namespace monograph::train
