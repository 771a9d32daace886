// Compiled with the flags of the baseline and nothing else.
#include "monograph/simd/scalar.h"

#include "monograph/kernels/linear/generic.h"

namespace monograph {

// Eight lanes in plain C++, which compilers map to whatever the baseline has. Products are rounded
// before they are added: a fused multiply-add would be a library call.
template <>
struct FloatLanes<simd::Scalar> {
  static constexpr std::size_t kLanes = 8, kRows = 2, kDxRows = 2, kDxVectors = 2;
  struct F32 {
    float lane[kLanes];
  };

  [[gnu::always_inline]] static F32 zero() { return {}; }
  [[gnu::always_inline]] static F32 set(float x) { return {{x, x, x, x, x, x, x, x}}; }
  [[gnu::always_inline]] static F32 load(const float* p) { return load_as(p); }
  [[gnu::always_inline]] static void store(float* p, F32 v) {
    for (std::size_t i = 0; i < kLanes; ++i) p[i] = v.lane[i];
  }
  [[gnu::always_inline]] static F32 add(F32 a, F32 b) {
    for (std::size_t i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  [[gnu::always_inline]] static F32 fma(F32 a, F32 b, F32 c) {
    for (std::size_t i = 0; i < kLanes; ++i) c.lane[i] += a.lane[i] * b.lane[i];
    return c;
  }

  template <class T>
  [[gnu::always_inline]] static F32 load_as(const T* p) {
    F32 v;
    for (std::size_t i = 0; i < kLanes; ++i) v.lane[i] = to_float(p[i]);
    return v;
  }

  [[gnu::always_inline]] static void sum4(const F32 (&v)[4], float* out) {
    for (std::size_t n = 0; n < 4; ++n) {
      const float* a = v[n].lane;
      out[n] = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
    }
  }
};

template const LinearKernels* find_linear<simd::Scalar>(DType, Pass);

}  // namespace monograph
