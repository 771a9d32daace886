// The merged values of one weight, a panel of rows at a time, in fp64.
//
//   LoRA      W + sum over adapters of factor * B * A
//   DoRA      m / |V| * V with V = W + factor * B * A, |V| the norm of each output's weights: of a
//             row, or of a column where the weight is [inputs, outputs]
//   tokens    rows replaced       bias   b + factor * lora_B.bias
// W is the base, or what replaces it; if it is packed, or base_as is set, dequantised to the type
// it was quantised from.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "monograph/cpu/parallel.h"
#include "monograph/merge/directions.h"
#include "monograph/merge/packed_copy.h"
#include "monograph/merge/plan.h"

namespace monograph {

// Experts [first, first + count) of a stack.
struct ExpertRange {
  std::size_t first = 0, count = 0;
};

// The ranges that a weight is merged in, one after another: single experts, so that memory does not
// grow with their number; all at once where quantised scales have one offset for the stack; one
// range for any other weight.
std::vector<ExpertRange> merged_ranges(const MergedWeight& weight);

class MergedPanels {
 public:
  // Of the experts of a range, if the weight is a stack. Unpacks the right factors of one expert:
  // rank x cols fp64 values for each LoRA. For base_as and for DoRA by columns it reads the whole
  // range once. Each panel but the last of a matrix has a multiple of `multiple` elements and at
  // least `least_rows` rows.
  MergedPanels(const MergedWeight& weight, ExpertRange range, ParallelFor parallel_for,
               std::size_t multiple = 1, std::size_t least_rows = 1);

  std::size_t cols() const { return cols_; }
  // A panel lies in one matrix: of a stack of experts, or the weight itself. Rows are those of the
  // whole weight.
  std::size_t panels() const { return matrices_ * panels_of_matrix(); }
  std::size_t panels_of_matrix() const { return (matrix_rows_ + panel_rows_ - 1) / panel_rows_; }
  std::size_t matrices() const { return matrices_; }
  std::size_t matrix_rows() const { return matrix_rows_; }
  std::size_t matrix_of(std::size_t panel) const {
    return first_matrix_ + panel / panels_of_matrix();
  }
  std::size_t first_row(std::size_t panel) const {
    return matrix_of(panel) * matrix_rows_ + panel % panels_of_matrix() * panel_rows_;
  }
  std::size_t last_row(std::size_t panel) const {
    return std::min(first_row(panel) + panel_rows_, (matrix_of(panel) + 1) * matrix_rows_);
  }

  // Of weight.base_as: the base as it is quantised; else null.
  const PackedCopy* packed_base() const { return packed_base_.get(); }

  // Rows [first, last) of a panel: the base as it is, and the merged values.
  void read_base(std::size_t first, std::size_t last, std::vector<float>& base) const;
  void merge(std::size_t first, std::size_t last, const std::vector<float>& base,
             std::vector<double>& merged) const;
  // The LoRAs that change one matrix of the range, all of them together and with their factors. Of
  // a DoRA by rows its norms are left out: they do not change the row space.
  LowRankFactors low_rank_factors(std::size_t matrix) const;
  // Throws Error if `stored`, the values of merge(first, ...) as they are read back from `type`,
  // has an infinity or a NaN where `merged` has a number.
  void check_stored(std::size_t first, std::string_view type, std::span<const double> merged,
                    std::span<const float> stored) const;

 private:
  struct Term {
    const LowRankChange* change;
    std::vector<double> right;  // in the layout of LowRankJob; empty for several experts
  };

  std::vector<double> unpack_right(const LowRankChange& change, std::size_t expert) const;
  void read_transposed(std::size_t first, std::size_t last, DType type, float* out) const;

  void start(std::size_t first, std::size_t last, const std::vector<float>& base,
             std::vector<double>& merged) const;
  void add_terms(std::size_t first, std::size_t last, std::vector<double>& merged) const;
  void scale_rows(std::size_t first, std::size_t last, std::vector<double>& merged) const;
  void find_column_factors(ParallelFor parallel_for);
  void quantize_base(ParallelFor parallel_for);

  const MergedWeight& weight_;
  ExpertRange range_;
  // Matrices in the range, the first of them, and how many an expert has.
  std::size_t matrices_ = 1, first_matrix_ = 0, of_expert_ = 1;
  std::size_t matrix_rows_ = 0, cols_ = 0, panel_rows_ = 1;
  std::unique_ptr<PackedCopy> packed_base_;  // of weight.base_as: the range
  std::vector<Term> terms_;
  std::vector<double> magnitude_, column_factors_;
};

}  // namespace monograph
