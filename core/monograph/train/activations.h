// What flows through the step: [tokens, width] in the type of the model, contiguous.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/kernels/linear/operands.h"

namespace monograph::train {

// Who computes. `parallel_for` must outlive whoever was given it.
struct Workers {
  ParallelFor parallel_for;
  int threads;
};

class Activations {
 public:
  Activations() = default;
  Activations(DType dtype, std::size_t rows, std::size_t cols);

  DType dtype() const { return dtype_; }
  std::size_t rows() const { return rows_; }
  std::size_t cols() const { return cols_; }
  std::size_t size() const { return rows_ * cols_; }
  void* data() { return bytes_.get(); }
  const void* data() const { return bytes_.get(); }
  Matrix in() const { return {data(), rows_, cols_, cols_}; }
  MutableMatrix out() { return {data(), rows_, cols_, cols_}; }
  // As the weight of a product: a factor of LoRA.
  LinearWeight weight() const;

 private:
  struct Free {
    void operator()(std::byte* bytes) const;
  };
  DType dtype_ = DType::kFloat32;
  std::size_t rows_ = 0, cols_ = 0;
  std::unique_ptr<std::byte[], Free> bytes_;
};

// sum = round(sum + part)
void add(Activations& sum, const Activations& part, const Workers& workers);

// x = round(x * factor)
void scale(Activations& x, float factor, const Workers& workers);

}  // namespace monograph::train
