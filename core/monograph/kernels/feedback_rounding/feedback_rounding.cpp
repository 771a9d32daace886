#include "monograph/kernels/feedback_rounding/feedback_rounding.h"

#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/formats/all.h"
#include "monograph/formats/group_numbers.h"
#include "monograph/formats/runs.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
FeedbackFn* feedback_variant(Format format);
template <class V>
void feedback_step(const FeedbackStep& step);

namespace {

template <class F>
void scales_of_row(const PackedView& weight, std::size_t row, float* out) {
  for_each_run<F>(weight, row, 0, weight.cols, [&](std::size_t, std::size_t count, float scale) {
    out = std::fill_n(out, count, scale);
  });
}

template <class... Fs>
void scales_of_row(FormatList<Fs...>, const PackedView& weight, std::size_t row, float* out) {
  ((weight.format == Fs::kFormat ? scales_of_row<Fs>(weight, row, out) : void()), ...);
}

// Of groups of a row also the zero points.
void groups_of_row(const PackedView& weight, std::size_t row, float* scales, float* zeros) {
  for (std::size_t group = 0; group < weight.cols / weight.block; ++group) {
    const GroupNumbers numbers = group_numbers(weight, row, group);
    scales = std::fill_n(scales, weight.block, numbers.scale);
    zeros = std::fill_n(zeros, weight.block, static_cast<float>(numbers.zero));
  }
}

template <class F>
void pack(const std::uint8_t* codes, std::size_t count, std::uint8_t* values) {
  if constexpr (F::kPerByte == 1) {
    std::copy_n(codes, count, values);
  } else {
    const bool high_first = F::kNibbles == Nibbles::kHighFirst;
    const int even = high_first ? 4 : 0, odd = 4 - even;
    for (std::size_t i = 0; i + 1 < count; i += 2) {
      values[i / 2] = static_cast<std::uint8_t>(codes[i] << even | codes[i + 1] << odd);
    }
    if (count % 2 == 0) return;
    std::uint8_t& last = values[count / 2];
    last = static_cast<std::uint8_t>((last & (15u << odd)) | codes[count - 1] << even);
  }
}

template <class... Fs>
void pack(FormatList<Fs...>, Format format, const std::uint8_t* codes, std::size_t count,
          std::uint8_t* values) {
  ((format == Fs::kFormat ? pack<Fs>(codes, count, values) : void()), ...);
}

}  // namespace

// P^-1 of column i from that of column i + 1, by the formula of Sherman and Morrison; d[i] is in
// the denominator: c[i] = P^-1 g / (d + g P^-1 g).
FeedbackRows feedback_rows(const std::vector<double>& g, const std::vector<double>& d,
                           std::size_t directions) {
  const std::size_t cols = d.size(), k = directions + directions % 2;
  FeedbackRows rows{cols, k, std::vector<double>(cols * k), std::vector<double>((cols + 1) * k)};
  for (std::size_t i = 0; i < cols; ++i) {
    std::copy_n(g.begin() + static_cast<long>(i * directions), directions,
                rows.g.begin() + static_cast<long>(i * k));
  }
  std::vector<double> inverse(k * k), u(k);
  for (std::size_t a = 0; a < k; ++a) inverse[a * k + a] = 1.0;
  for (std::size_t i = cols; i-- > 0;) {
    const double* at = rows.g.data() + i * k;
    std::fill(u.begin(), u.end(), 0.0);
    for (std::size_t a = 0; a < k; ++a) {
      for (std::size_t b = 0; b < k; ++b) u[b] += inverse[a * k + b] * at[a];
    }
    double denominator = d[i];
    for (std::size_t a = 0; a < k; ++a) denominator += at[a] * u[a];
    const double factor = 1.0 / denominator;
    for (std::size_t a = 0; a < k; ++a) {
      rows.c[i * k + a] = u[a] * factor;
      // u[a] * u[b] first: the inverse stays symmetric to the last bit.
      for (std::size_t b = 0; b < k; ++b) inverse[a * k + b] -= u[a] * u[b] * factor;
    }
  }
  return rows;
}

const std::vector<Variant<FeedbackFn, ByFormat>>& feedback_variants() {
  static const auto rows = make_variants<FeedbackFn>(
      LoopTargets{}, every_format(),
      []<class V>(ByFormat key) { return feedback_variant<V>(key.format); });
  return rows;
}

const std::vector<Variant<FeedbackStepFn>>& feedback_step_variants() {
  static const auto rows = make_variants<FeedbackStepFn>(
      LoopTargets{}, []<class V>() -> FeedbackStepFn* { return feedback_step<V>; });
  return rows;
}

void round_with_feedback(const PackedView& weight, std::size_t first, std::size_t rows, DType dtype,
                         const FeedbackRows& feedback, const double* input, std::uint8_t* codes) {
  FeedbackFn* run = pick(feedback_variants(), weight.format);
  if (run == nullptr) throw Error("round_with_feedback: no variant for this format");
  const std::size_t cols = weight.cols;
  MONOGRAPH_ASSERT(cols == feedback.cols);
  const bool groups = in_list(RowFormats{}, weight.format);
  std::vector<float> scales(kFeedbackLanes * cols), zeros(groups ? kFeedbackLanes * cols : 0);
  std::vector<double> sums(feedback.directions * kFeedbackLanes);
  for (std::size_t row = 0; row < rows; row += kFeedbackLanes) {
    const std::size_t count = std::min(kFeedbackLanes, rows - row);
    for (std::size_t i = 0; i < count; ++i) {
      if (groups) {
        groups_of_row(weight, first + row + i, scales.data() + i * cols, zeros.data() + i * cols);
      } else {
        scales_of_row(PackedFormats{}, weight, first + row + i, scales.data() + i * cols);
      }
    }
    run({dtype, cols, feedback.directions, feedback.g.data(), feedback.c.data(), input + row * cols,
         scales.data(), codes + row * cols, sums.data(), zeros.data()},
        count);
  }
}

void pack_codes(Format format, const std::uint8_t* codes, std::size_t count, std::uint8_t* values) {
  pack(PackedFormats{}, format, codes, count, values);
}

}  // namespace monograph
