// What forward and backward of a layer share.
#pragma once

#include <cstddef>
#include <vector>

#include "monograph/base/function_ref.h"
#include "monograph/kernels/experts/kernels.h"
#include "monograph/kernels/experts/projection.h"
#include "monograph/kernels/experts/routing.h"

namespace monograph {

class ExpertsLayer {
 public:
  // The problem must outlive it.
  ExpertsLayer(const ExpertsProblem& problem, ParallelFor parallel_for);
  ExpertsLayer(const ExpertsLayer&) = delete;
  ExpertsLayer& operator=(const ExpertsLayer&) = delete;

  const ExpertsProblem& problem;
  const ParallelFor parallel_for;
  const Routing routing;
  const ExpertsKernels& kernels;
  const ExpertsProduct up, down;
  std::vector<float> slot_weights;   // of each slot
  std::vector<float> place_weights;  // of each place

  std::size_t inner() const { return problem.down.in; }
  std::size_t kept() const { return routing.kept(); }
  std::size_t element() const { return size_bytes(problem.dtype); }
  Buffer places_by(std::size_t cols) const { return Buffer(kept() * cols * element()); }
  ExpertsRows x() const { return {problem.x, true}; }
  ExpertsRows rows(const void* data, std::size_t cols) const {
    return {{data, kept(), cols, cols}, false};
  }

  void compute_pre(const Buffer& u1, void* pre) const;
  Buffer activate(const void* pre) const;
  // dpre of dh; dpre may be pre, or nullptr if nobody wants it. dots: <h, dh> of each place, or
  // nullptr. With `keep_h` h takes the place of dh.
  void activate_back(const void* pre, const Buffer& dh, void* dpre, float* dots, bool keep_h) const;

  // out[t] = sum over slots of factor * row, `width` columns, whose rows compute(first_col, rows)
  // makes strip by strip: never all columns of all slots where they are many.
  void sum_slots(std::size_t width, const float* factors, void* out,
                 FunctionRef<void(std::size_t, const MutableMatrix&)> compute) const;

 private:
  ActivationJob activation_of(const void* pre, std::size_t place) const;
};

}  // namespace monograph
