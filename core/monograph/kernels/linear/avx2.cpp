// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx2.h"

#include "monograph/kernels/linear/generic.h"

namespace monograph {

// 12 accumulators of 16 registers.
template <>
struct FloatLanes<simd::Avx2> {
  using F32 = __m256;
  static constexpr std::size_t kLanes = 8, kRows = 3, kDxRows = 3, kDxVectors = 2;

  [[gnu::always_inline]] static F32 zero() { return _mm256_setzero_ps(); }
  [[gnu::always_inline]] static F32 set(float x) { return _mm256_set1_ps(x); }
  [[gnu::always_inline]] static F32 load(const float* p) { return _mm256_loadu_ps(p); }
  [[gnu::always_inline]] static void store(float* p, F32 v) { _mm256_storeu_ps(p, v); }
  [[gnu::always_inline]] static F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
  [[gnu::always_inline]] static F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }

  template <class T>
  [[gnu::always_inline]] static F32 load_as(const T* p) {
    return simd::Avx2::load_f32(p);
  }

  // Four sums over the lanes, each by the same tree.
  [[gnu::always_inline]] static void sum4(const F32 (&v)[4], float* out) {
    const F32 a = add(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    const F32 b = add(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
    const __m256d da = _mm256_castps_pd(a), db = _mm256_castps_pd(b);
    const F32 two = add(_mm256_castpd_ps(_mm256_unpacklo_pd(da, db)),
                        _mm256_castpd_ps(_mm256_unpackhi_pd(da, db)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
  }
};

template const LinearKernels* find_linear<simd::Avx2>(DType, Pass);

}  // namespace monograph
