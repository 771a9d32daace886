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
#include "monograph/merge/packed_copy.h"
#include "monograph/merge/plan.h"

namespace monograph {

class MergedPanels {
 public:
  // Unpacks the right factors: rank x cols fp64 values for each LoRA. For base_as and for DoRA by
  // columns it reads the whole weight once. Each panel but the last has a multiple of `multiple`
  // elements.
  MergedPanels(const MergedWeight& weight, ParallelFor parallel_for, std::size_t multiple = 1);

  std::size_t rows() const { return rows_; }
  std::size_t cols() const { return cols_; }
  std::size_t panel_rows() const { return panel_rows_; }
  std::size_t panels() const { return matrices_ * panels_of_matrix(); }
  // A panel lies in one matrix: of a stack of experts, or the weight itself.
  std::size_t matrices() const { return matrices_; }
  std::size_t matrix_rows() const { return matrices_ == 0 ? 0 : rows_ / matrices_; }
  std::size_t matrix_of(std::size_t panel) const { return panel / panels_of_matrix(); }
  std::size_t first_row(std::size_t panel) const {
    return matrix_of(panel) * matrix_rows() + panel % panels_of_matrix() * panel_rows_;
  }
  std::size_t last_row(std::size_t panel) const {
    return std::min(first_row(panel) + panel_rows_, (matrix_of(panel) + 1) * matrix_rows());
  }

  // Rows [first, last) of a panel: the base as it is, and the merged values.
  void read_base(std::size_t first, std::size_t last, std::vector<float>& base) const;
  void merge(std::size_t first, std::size_t last, const std::vector<float>& base,
             std::vector<double>& merged) const;
  // Throws Error if `stored`, the values of merge(first, ...) as they are read back from `type`,
  // has an infinity or a NaN where `merged` has a number.
  void check_stored(std::size_t first, std::string_view type, std::span<const double> merged,
                    std::span<const float> stored) const;

 private:
  struct Term {
    const LowRankChange* change;
    std::vector<double> right;  // in the layout of LowRankJob; empty for a stack
  };

  std::size_t panels_of_matrix() const { return (matrix_rows() + panel_rows_ - 1) / panel_rows_; }
  std::vector<double> unpack_right(const LowRankChange& change, std::size_t expert) const;
  void read_turned(std::size_t first, std::size_t last, DType type, float* out) const;

  void start(std::size_t first, std::size_t last, const std::vector<float>& base,
             std::vector<double>& merged) const;
  void add_terms(std::size_t first, std::size_t last, std::vector<double>& merged) const;
  void scale_rows(std::size_t first, std::size_t last, std::vector<double>& merged) const;
  void find_column_factors(ParallelFor parallel_for);
  void quantize_base(ParallelFor parallel_for);

  const MergedWeight& weight_;
  std::size_t matrices_ = 1, rows_ = 0, cols_ = 0, panel_rows_ = 1;
  std::unique_ptr<PackedCopy> packed_base_;  // of weight.base_as
  std::vector<Term> terms_;
  std::vector<double> magnitude_, column_factors_;
};

}  // namespace monograph
