#include "monograph/kernels/experts/factors.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/kernels/experts/kernels.h"
#include "monograph/kernels/linear/products.h"

namespace monograph {
namespace {

// To elements of `to`, from those of the same type or of fp32; others are brought to fp32 before.
auto transposing(DType from, DType to) {
  const ExpertsKernels& kernels = pick_experts(to);
  return from == to ? kernels.transpose : kernels.transpose_floats;
}

// What `transposing` can take, and what keeps it alive.
struct Source {
  std::vector<float> widened;
  const std::byte* data;
  DType dtype;
};
Source source_of(const void* from, DType dtype, std::size_t count, DType to) {
  Source source = {{}, static_cast<const std::byte*>(from), dtype};
  if (dtype == to || dtype == DType::kFloat32) return source;
  source.widened.resize(count);
  convert(from, dtype, count, source.widened.data(), DType::kFloat32);
  source.data = reinterpret_cast<const std::byte*>(source.widened.data());
  source.dtype = DType::kFloat32;
  return source;
}

}  // namespace

void convert(const void* from, DType from_dtype, std::size_t count, void* to, DType to_dtype) {
  if (from_dtype == to_dtype) {
    if (count != 0) std::memcpy(to, from, count * size_bytes(to_dtype));
  } else if (from_dtype == DType::kFloat32) {
    pick_experts(to_dtype).round(static_cast<const float*>(from), count, to);
  } else if (to_dtype == DType::kFloat32) {
    pick_experts(from_dtype).widen(from, count, static_cast<float*>(to));
  } else {
    constexpr std::size_t kPiece = 256;
    float wide[kPiece];
    for (std::size_t i = 0; i < count; i += kPiece) {
      const std::size_t size = std::min(kPiece, count - i);
      const auto* in = static_cast<const std::byte*>(from) + i * size_bytes(from_dtype);
      pick_experts(from_dtype).widen(in, size, wide);
      pick_experts(to_dtype).round(wide, size,
                                   static_cast<std::byte*>(to) + i * size_bytes(to_dtype));
    }
  }
}

void transpose(const void* from, DType from_dtype, std::size_t rows, std::size_t cols, void* to,
               DType to_dtype) {
  const Source source = source_of(from, from_dtype, rows * cols, to_dtype);
  const std::size_t in = size_bytes(source.dtype), out = size_bytes(to_dtype);
  auto* const transpose_tile = transposing(source.dtype, to_dtype);
  for (std::size_t r = 0; r < rows; r += kTileSide)
    for (std::size_t c = 0; c < cols; c += kTileSide)
      transpose_tile({source.data + (r * cols + c) * in, cols, std::min(kTileSide, rows - r),
                      std::min(kTileSide, cols - c), kInOrder,
                      static_cast<std::byte*>(to) + (c * rows + r) * out, rows});
}

void gather_factors(const FactorsJob& job, ParallelFor parallel_for) {
  const std::size_t rank = job.rank, experts = job.experts, row = rank * experts;
  const Source source = source_of(job.b, job.b_dtype, job.out * row, job.dtype);
  const std::size_t in = size_bytes(source.dtype), out = size_bytes(job.dtype);
  auto* const transpose_tile = transposing(source.dtype, job.dtype);
  std::vector<std::uint32_t> index(experts, kSkippedRow);
  for (std::size_t i = 0; i < job.active.size(); ++i)
    index[job.active[i]] = static_cast<std::uint32_t>(i);
  // `rows` entries of sixteen experts: from `from` on, `stride` apart, to `to` within each.
  const auto gather = [&](std::size_t from, std::size_t stride, std::size_t rows, std::size_t to) {
    for (std::size_t e = 0; e < experts; e += kTileSide)
      transpose_tile({source.data + (from + e) * in, stride, rows, std::min(kTileSide, experts - e),
                      index.data() + e, static_cast<std::byte*>(job.factors) + to * out,
                      factor_stride(rank * job.out)});
  };
  parallel_for((job.out + kTileSide - 1) / kTileSide, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t o = begin * kTileSide; o < std::min(end * kTileSide, job.out);
         o += kTileSide) {
      const std::size_t rows = std::min(kTileSide, job.out - o);
      if (job.rank_first) {
        for (std::size_t j = 0; j < rank; ++j)
          gather(o * row + j * experts, row, rows, j * job.out + o);
        continue;
      }
      for (std::size_t r = o; r < o + rows; ++r)
        for (std::size_t j = 0; j < rank; j += kTileSide)
          gather(r * row + j * experts, experts, std::min(kTileSide, rank - j), r * rank + j);
    }
  });
}

}  // namespace monograph
