// Sixteen rows to sixteen columns by shuffles.
#pragma once

#include "monograph/kernels/experts/generic.h"
#include "monograph/simd/row_lanes_avx512.h"
#include "monograph/simd/transpose_avx512.h"

namespace monograph {

template <>
struct TransposeTile<simd::Avx512> {
  template <class From, class To>
  static void run(const From* in, const TransposeJob& job, To* out) {
    using W = RowWalk<simd::Avx512>;
    static_assert(W::kLanes == kTileSide);
    __m512i v[kTileSide];
    if (job.rows == kTileSide && job.cols == kTileSide) {
      unrolled<kTileSide>([&](auto i) __attribute__((always_inline)) {
        v[i] = _mm512_castps_si512(RowLanes<simd::Avx512>::load_as(in + i * job.in_stride));
      });
    } else {
      for (std::size_t i = 0; i < kTileSide; ++i)
        v[i] = i < job.rows ? _mm512_castps_si512(W::load(in + i * job.in_stride, job.cols))
                            : _mm512_setzero_si512();
    }
    transpose_16x16(v);
    for (std::size_t k = 0; k < job.cols; ++k)
      if (job.index[k] != kSkippedRow)
        W::store(out + job.index[k] * job.out_stride, _mm512_castsi512_ps(v[k]), job.rows);
  }
};

}  // namespace monograph
