// One projection of all experts as lists of products: W_e with its LoRA, forward and back.
#pragma once

#include <cstddef>
#include <vector>

#include "monograph/kernels/experts/buffer.h"
#include "monograph/kernels/experts/experts.h"
#include "monograph/kernels/experts/routing.h"
#include "monograph/kernels/experts/tiles.h"

namespace monograph {

// The left rows of products: of each token, gathered, or of each place, in order.
struct ExpertsRows {
  Matrix matrix;
  bool by_token = false;
};

class ExpertsProduct {
 public:
  // All must outlive it.
  ExpertsProduct(const ExpertsProblem& problem, const ExpertsProjection& projection,
                 const Routing& routing, ParallelFor parallel_for);

  bool has_low_rank() const { return projection_.rank != 0; }
  // scale * x A^T and scale * dout B, [places, rank] in the type of x; none without a low-rank
  // part.
  Buffer low_rank(const ExpertsRows& x) const;
  Buffer low_rank_back(const ExpertsRows& dout) const;
  // Columns [first_col, first_col + out.cols) of W_e x + B u + bias, and of dout W_e + du A; a row
  // of `out` for each place.
  void forward(const ExpertsRows& x, const Buffer& u, std::size_t first_col,
               const MutableMatrix& out) const;
  void back(const ExpertsRows& dout, const Buffer& du, std::size_t first_col,
            const MutableMatrix& out) const;
  // The bias of the i-th active expert in the type of x.
  const std::byte* bias(std::size_t i) const;

 private:
  struct Part {  // rows of an expert's weight that are one view
    std::size_t first;
    LinearWeight weight;
  };
  // Of at most `most` rows.
  std::vector<Part> parts(std::size_t i, std::size_t most) const;
  // Of the i-th active expert, from gathered factors.
  LinearWeight factor(const Buffer& of_active, std::size_t i, std::size_t rows, std::size_t cols,
                      std::size_t first_row = 0) const;
  // The factors of each active expert in the type of x: B as [out, rank] or [rank, out], A as
  // [rank, in] or [in, rank].
  Buffer gather_b(bool rank_first) const;
  Buffer gather_a(bool transposed) const;
  const Buffer& a_rows() const;  // [rank, in], made once
  LinearTerm rows_of(const ExpertsRows& rows, std::size_t i) const;
  LinearTerm places_of(const Buffer& u, std::size_t i) const;
  // The i-th active expert's factor is factors + i * stride bytes.
  Buffer narrow_products(const ExpertsTiles& tiles, const ExpertsRows& rows, NarrowFactor kind,
                         const void* factors, std::size_t stride) const;
  Buffer low_rank_product(const ExpertsRows& rows, const std::vector<LinearWeight>& factors) const;

  const ExpertsProblem& problem_;
  const ExpertsProjection& projection_;
  const Routing& routing_;
  const ParallelFor parallel_for_;
  const std::size_t element_;  // bytes
  Buffer bias_;                // [E, out], where its type is not that of x
  mutable Buffer a_rows_;
};

}  // namespace monograph
