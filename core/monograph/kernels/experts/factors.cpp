#include "monograph/kernels/experts/factors.h"

#include <algorithm>

#include "monograph/base/float_types.h"

namespace monograph {
namespace {

// body.template operator()<From, To>(from, to).
template <class Body>
void with_types(const void* from, DType from_dtype, void* to, DType to_dtype, const Body& body) {
  with_type(from_dtype, [&]<class From>() {
    with_type(to_dtype,
              [&]<class To>() { body(static_cast<const From*>(from), static_cast<To*>(to)); });
  });
}

// Rows of B that stay in the cache while every expert takes its part.
constexpr std::size_t kRows = 16;

}  // namespace

void convert(const void* from, DType from_dtype, std::size_t count, void* to, DType to_dtype) {
  with_types(from, from_dtype, to, to_dtype, [&]<class From, class To>(const From* in, To* out) {
    for (std::size_t i = 0; i < count; ++i) out[i] = from_float<To>(to_float(in[i]));
  });
}

void transpose(const void* from, DType from_dtype, std::size_t rows, std::size_t cols, void* to,
               DType to_dtype) {
  with_types(from, from_dtype, to, to_dtype, [&]<class From, class To>(const From* in, To* out) {
    for (std::size_t c = 0; c < cols; c += kRows)
      for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t i = c; i < std::min(c + kRows, cols); ++i)
          out[i * rows + r] = from_float<To>(to_float(in[r * cols + i]));
  });
}

void gather_factors(const FactorsJob& job, ParallelFor parallel_for) {
  const std::size_t stride = job.rank * job.experts, each = job.rank * job.out;
  const auto gather = [&]<class From, class To>(const From* b, To* factors) {
    parallel_for((job.out + kRows - 1) / kRows, 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t o = begin * kRows; o < std::min(end * kRows, job.out); o += kRows) {
        const std::size_t rows = std::min(kRows, job.out - o);
        for (std::size_t i = 0; i < job.active.size(); ++i) {
          const From* in = b + o * stride + job.active[i];
          To* const out = factors + i * each;
          for (std::size_t r = 0; r < rows; ++r)
            for (std::size_t j = 0; j < job.rank; ++j) {
              const To value = from_float<To>(to_float(in[r * stride + j * job.experts]));
              out[job.rank_first ? j * job.out + o + r : (o + r) * job.rank + j] = value;
            }
        }
      }
    });
  };
  with_types(job.b, job.b_dtype, job.factors, job.dtype, gather);
}

}  // namespace monograph
