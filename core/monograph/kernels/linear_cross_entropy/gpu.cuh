// Rows of the loss on a GPU, from panels of logits: the formulas of linear_cross_entropy.h.
//   z = cap(scale * logit)      loss = log sum exp(z) - z[label]      lse = log sum exp(z)
// The logits have the type of the activations; everything of a row is fp32 from there, its sums
// fp64 over parts of 16 a thread. A block of threads has one row; the order of a sum follows from
// the size of the vocabulary alone.
#pragma once

#include "monograph/gpu/prims.h"
#include "monograph/kernels/linear_cross_entropy/kernels.h"

namespace monograph::gpu {

inline constexpr unsigned kLossThreads = 256;
inline constexpr unsigned kLossWarps = kLossThreads / kLanes;
inline constexpr unsigned kLossPart = 16;
inline constexpr std::int64_t kNoTokenLabel = -100;  // kIgnoredLabel
// No 0 * infinity: exp of this is 0 where a term of a distribution is.
inline constexpr float kLeastLogit = -138.0f;

struct LossShared {
  double sums[kLossWarps];
  float peaks[kLossWarps];
};

// The same in all threads; uses the shared memory from barrier to barrier.
MONOGRAPH_DEVICE double sum_of_block(LossShared& shared, double x) {
  for (unsigned mask = kLanes / 2; mask != 0; mask /= 2) x = add64(x, shuffle_xor(x, mask));
  if (thread_index() % kLanes == 0) write(&shared.sums[thread_index() / kLanes], x);
  sync_threads();
  double sum = 0.0;
  for (unsigned i = 0; i < kLossWarps; ++i) sum = add64(sum, read(&shared.sums[i]));
  sync_threads();
  return sum;
}
// A NaN is no maximum.
MONOGRAPH_DEVICE float larger_of(float a, float b) { return a > b ? a : b; }
MONOGRAPH_DEVICE float largest_of_block(LossShared& shared, float x) {
  for (unsigned mask = kLanes / 2; mask != 0; mask /= 2) x = larger_of(shuffle_xor(x, mask), x);
  if (thread_index() % kLanes == 0) write(&shared.peaks[thread_index() / kLanes], x);
  sync_threads();
  float largest = -__builtin_inff();
  for (unsigned i = 0; i < kLossWarps; ++i) largest = larger_of(read(&shared.peaks[i]), largest);
  sync_threads();
  return largest;
}

struct ZOfLogit {
  float scale, inner, outer;
  bool cap;

  MONOGRAPH_DEVICE explicit ZOfLogit(const LogitsMap& map)
      : scale(map.scale),
        inner(map.softcap > 0 ? div(map.scale, map.softcap) : 0.0f),
        outer(map.softcap),
        cap(map.softcap > 0) {}
  MONOGRAPH_DEVICE float operator()(float logit) const {
    return cap ? mul(tanh_of(mul(logit, inner)), outer) : mul(logit, scale);
  }
  MONOGRAPH_DEVICE float with_slope(float logit, float& slope) const {
    slope = scale;
    if (!cap) return mul(logit, scale);
    const float t = tanh_of(mul(logit, inner));
    slope = mul(scale, sub(1.0f, mul(t, t)));
    return mul(t, outer);
  }
};

template <class T>
struct LogitsPanel {
  T* logits;  // row y of the launch begins `stride` elements after row y - 1
  std::size_t stride, count;
  LogitsMap map;
  const std::int64_t* labels;  // [rows]
};

// [rows] each. Statistics are nullptr for none: -sum p log p, log sum p^2, the mean of z, and
// whether the label is the most likely (the first of several).
struct LossRows {
  float *loss, *lse;
  float *entropy, *log_sum_squares, *mean;
  bool* top;
};

// A block of kLossThreads for each row. With `gradient` the logits become those of the loss, d loss
// / d logit rounded to T. A label of -100 gives 0 everywhere; one outside of [0, count) NaN.
template <class T>
MONOGRAPH_KERNEL(kLossThreads)
loss_rows_kernel(LogitsPanel<T> panel, LossRows out, bool gradient) {
  LossShared& shared = shared_memory<LossShared>();
  const std::size_t row = block_index_x();
  T* const logits = panel.logits + row * panel.stride;
  const std::int64_t label = read(panel.labels + row);
  const bool ignored = label == kNoTokenLabel;
  const bool valid = label >= 0 && static_cast<std::size_t>(label) < panel.count;
  if (ignored || !valid) {
    const float value = ignored ? 0.0f : as_float(0x7fc00000u);
    if (thread_index() == 0) {
      write(out.loss + row, value);
      write(out.lse + row, value);
      if (out.entropy != nullptr) {
        write(out.entropy + row, value);
        write(out.log_sum_squares + row, value);
        write(out.mean + row, value);
        write(out.top + row, false);
      }
    }
    for (std::size_t i = thread_index(); gradient && i < panel.count; i += kLossThreads)
      write(logits + i, round_to<T>(value));
    return;
  }
  const std::size_t at_label = static_cast<std::size_t>(label);
  const ZOfLogit z_of(panel.map);
  const float label_z = z_of(widen(read(logits + at_label)));
  float peak = -__builtin_inff(), before = peak;
  for (std::size_t i = thread_index(); i < panel.count; i += kLossThreads) {
    const float z = z_of(widen(read(logits + i)));
    peak = larger_of(z, peak);
    if (i < at_label) before = larger_of(z, before);
  }
  peak = largest_of_block(shared, peak);
  const bool statistics = out.entropy != nullptr;
  double sum = 0.0, weighted = 0.0, squares = 0.0, total = 0.0;
  for (std::size_t i = thread_index(); i < panel.count;) {
    float part = 0.0f, part_weighted = 0.0f, part_squares = 0.0f, part_total = 0.0f;
    for (unsigned k = 0; k < kLossPart && i < panel.count; ++k, i += kLossThreads) {
      const float z = z_of(widen(read(logits + i)));
      const float away = sub(z, peak), e = exp_of(away);
      part = add(part, e);
      if (!statistics) continue;
      part_weighted = fma(e, larger_of(away, kLeastLogit), part_weighted);
      part_squares = fma(e, e, part_squares);
      part_total = add(part_total, z);
    }
    sum = add64(sum, part);
    weighted = add64(weighted, part_weighted);
    squares = add64(squares, part_squares);
    total = add64(total, part_total);
  }
  sum = sum_of_block(shared, sum);
  const double log_sum = log_of(sum);
  if (thread_index() == 0) {
    const double away = add64(peak, -static_cast<double>(label_z));
    write(out.loss + row, static_cast<float>(add64(log_sum, away)));
    write(out.lse + row, static_cast<float>(add64(log_sum, peak)));
  }
  if (statistics) {
    weighted = sum_of_block(shared, weighted);
    squares = sum_of_block(shared, squares);
    total = sum_of_block(shared, total);
    before = largest_of_block(shared, before);
    if (thread_index() == 0) {
      write(out.entropy + row, static_cast<float>(add64(log_sum, -div64(weighted, sum))));
      write(out.log_sum_squares + row,
            static_cast<float>(add64(log_of(squares), -(log_sum + log_sum))));
      write(out.mean + row, static_cast<float>(div64(total, static_cast<double>(panel.count))));
      write(out.top + row, label_z >= peak && label_z > before);
    }
  }
  if (!gradient) return;
  const float inverse = static_cast<float>(div64(1.0, sum));
  for (std::size_t i = thread_index(); i < panel.count; i += kLossThreads) {
    float slope;
    const float z = z_of.with_slope(widen(read(logits + i)), slope);
    const float p = mul(exp_of(sub(z, peak)), inverse);
    write(logits + i, round_to<T>(mul(sub(p, i == at_label ? 1.0f : 0.0f), slope)));
  }
}

// From the forward's lse: each logit of a panel becomes
//   g * (exp(z - lse) - [it is the label's]) * dz/dlogit                   without `entropy`
//   -g * p * (log p + entropy) * dz/dlogit, with log p = z - lse           with it
// Column 0 of the panel is entry `first` of the vocabulary. A label of -100 gives 0.
struct LossGradientRows {
  const float *lse, *g, *entropy;  // [rows]
  std::size_t first;
};
template <class T>
MONOGRAPH_KERNEL(kLossThreads)
logits_gradient_kernel(LogitsPanel<T> panel, LossGradientRows rows) {
  const std::size_t row = block_index_x();
  T* const logits = panel.logits + row * panel.stride;
  const std::int64_t label = read(panel.labels + row);
  const ZOfLogit z_of(panel.map);
  const float lse = read(rows.lse + row), g = read(rows.g + row);
  const float entropy = rows.entropy == nullptr ? 0.0f : read(rows.entropy + row);
  for (std::size_t i = thread_index(); i < panel.count; i += kLossThreads) {
    float d = 0.0f;
    if (label != kNoTokenLabel) {
      float slope;
      const float log_p = sub(z_of.with_slope(widen(read(logits + i)), slope), lse);
      const float p = exp_of(log_p);
      if (rows.entropy != nullptr)
        d = mul(mul(mul(p, add(larger_of(log_p, kLeastLogit), entropy)), -g), slope);
      else
        d = mul(sub(mul(p, g), static_cast<std::int64_t>(rows.first + i) == label ? g : 0.0f),
                slope);
    }
    write(logits + i, round_to<T>(d));
  }
}

}  // namespace monograph::gpu
