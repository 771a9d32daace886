// Rounds rows to a packed format so that the error has nearly no part in given directions.
//
// With H = diag(d) + G G^T, G [cols, directions], a row w and its stored values q, columns in
// order:
//   q[i] = nearest(w[i] - s . c[i])      s += (q[i] - w[i]) g[i]
//   c[i] = (I + sum over j >= i of g[j] g[j]^T / d[j])^-1 g[i] / d[i]
// That is GPTQ with this H, without a cols x cols matrix. q is what a model reads: the code's value
// times the scale as it is stored, rounded to fp32 and to the type of the weight. Of integers with
// zero points the code's value is the code less the zero point of its group.
//
// Everything but the division by the scale and q is fp64; the sum over the directions runs over
// the even and the odd ones apart, then both are added. A vector holds the same column of several
// rows, no sum crosses its lanes and nothing is fused: the same bits on every instruction set, for
// any number of threads and whatever rows are taken together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/variant.h"
#include "monograph/formats/packed_view.h"
#include "monograph/kernels/keys.h"

namespace monograph {

// G and c of one matrix. `directions` is even: the last one may be zeros.
struct FeedbackRows {
  std::size_t cols = 0, directions = 0;
  std::vector<double> g;  // cols x directions
  std::vector<double> c;  // (cols + 1) x directions, the last row zeros
};

// `d` has a positive value for each column, `g` is d.size() x directions; c is computed in fp64.
FeedbackRows feedback_rows(const std::vector<double>& g, const std::vector<double>& d,
                           std::size_t directions);

// Rows that a kernel takes together.
inline constexpr std::size_t kFeedbackLanes = 16;

struct FeedbackJob {
  DType dtype;  // what the values are decoded to
  std::size_t cols, directions;
  const double *g, *c;  // of FeedbackRows
  const double* input;  // rows x cols
  const float* scales;  // rows x cols: the scale of each element; 0 gives the code of 0
  std::uint8_t* codes;  // rows x cols, one a byte
  double* sums;         // directions x kFeedbackLanes, for the kernel's use
  // Of integers: the zero point of each element, rows x cols; codes are signed.
  const float* zeros = nullptr;
};

// One column of kFeedbackLanes rows whose values are rounded elsewhere: their errors go into `sums`
// by `g`, directions values; `corrections` becomes what the next column is rounded less, by its
// `c`.
struct FeedbackStep {
  std::size_t directions;
  const double *g, *c;
  const double* errors;  // one a row
  double* sums;          // directions x kFeedbackLanes
  double* corrections;   // one a row
};
using FeedbackStepFn = void(const FeedbackStep& step);

const std::vector<Variant<FeedbackStepFn>>& feedback_step_variants();

// At most kFeedbackLanes rows.
using FeedbackFn = void(const FeedbackJob& job, std::size_t rows);

// Every variant, best instruction set first.
const std::vector<Variant<FeedbackFn, ByFormat>>& feedback_variants();

// Rows [first, first + rows) of a weight, all of one matrix, against the scales of `weight`; its
// values are not read. `input` is rows x cols and finite. One code a byte to `codes`.
void round_with_feedback(const PackedView& weight, std::size_t first, std::size_t rows, DType dtype,
                         const FeedbackRows& feedback, const double* input, std::uint8_t* codes);

// `count` codes into the bytes of a format (FormatInfo::kernels), from the first half of a byte on.
// What an odd count leaves of the last byte stays as it is.
void pack_codes(Format format, const std::uint8_t* codes, std::size_t count, std::uint8_t* values);

}  // namespace monograph
