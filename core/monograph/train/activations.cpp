#include "monograph/train/activations.h"

#include <cstdint>

#include "monograph/base/float_types.h"

namespace monograph::train {
namespace {

constexpr std::align_val_t kAlignment{64};
constexpr std::size_t kGrain = 1 << 15;  // elements that are worth a thread

}  // namespace

void Activations::Free::operator()(std::byte* bytes) const {
  ::operator delete[](bytes, kAlignment);
}

Activations::Activations(DType dtype, std::size_t rows, std::size_t cols)
    : dtype_(dtype),
      rows_(rows),
      cols_(cols),
      bytes_(static_cast<std::byte*>(
          ::operator new[](rows* cols* size_bytes(dtype) + 64, kAlignment))) {}

LinearWeight Activations::weight() const {
  LinearWeight weight;
  weight.packed.rows = rows_;
  weight.packed.cols = cols_;
  weight.packed.values = static_cast<const std::uint8_t*>(data());
  weight.dtype = dtype_;
  return weight;
}

void add(Activations& sum, const Activations& part, const Workers& workers) {
  with_type(sum.dtype(), [&]<class T>() {
    T* const to = static_cast<T*>(sum.data());
    const T* const from = static_cast<const T*>(part.data());
    workers.parallel_for(sum.size(), kGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i)
        to[i] = from_float<T>(to_float(to[i]) + to_float(from[i]));
    });
  });
}

void scale(Activations& x, float factor, const Workers& workers) {
  with_type(x.dtype(), [&]<class T>() {
    T* const to = static_cast<T*>(x.data());
    workers.parallel_for(x.size(), kGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) to[i] = from_float<T>(to_float(to[i]) * factor);
    });
  });
}

}  // namespace monograph::train
