// A gate of 16 bits is one of 65536: activations and slopes come from a table, at the speed of
// memory. The code of the other sets fills it, so the bits are theirs. For CPUs with AMX, because
// all of them gather fast; on some older ones a gather takes longer than the activation.
// Compiled with the flags of this instruction set and nothing else.

#include "monograph/base/float_types.h"
#include "monograph/kernels/gated_activation/activations.h"
#include "monograph/kernels/gated_activation/gated_activation.h"
#include "monograph/simd/row_lanes_avx512.h"

namespace monograph {
namespace {

using L = RowLanes<simd::Avx512>;
using F32 = L::F32;
constexpr std::size_t kGates = 65536, kLanes = L::kLanes, kBlock = 2 * kLanes;

template <class T, template <class> class F>
struct Table {
  alignas(64) float values[kGates];
  alignas(64) float slopes[kGates];

  Table() {
    for (std::size_t i = 0; i < kGates; i += kLanes) {
      T gates[kLanes];
      for (std::size_t k = 0; k < kLanes; ++k) gates[k] = {static_cast<std::uint16_t>(i + k)};
      const auto f = F<simd::Avx512>::template with_slope<T>(L::load_as(gates));
      L::store(values + i, L::template round_as<T>(f.value));
      L::store(slopes + i, f.slope);
    }
  }
};

template <class T, template <class> class F>
const Table<T, F>& table() {
  static const Table<T, F> one;
  return one;
}

// Where two vectors of gates stand in the table, in the order of load_two.
struct Places {
  __m512i a, b;
};
template <class T>
[[gnu::always_inline]] inline Places places_of(const T* gate) {
  const __m512i bits = _mm512_loadu_si512(gate);
  if constexpr (L::kSplits<T>)
    return {_mm512_and_si512(bits, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32(bits, 16)};
  return {_mm512_cvtepu16_epi32(_mm512_castsi512_si256(bits)),
          _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(bits, 1))};
}
[[gnu::always_inline]] inline F32 found(const float* column, __m512i places) {
  return _mm512_i32gather_ps(places, column, 4);
}

template <class T>
[[gnu::always_inline]] inline void forward_block(const float* values, const T* gate, const T* up,
                                                 T* y) {
  const Places at = places_of(gate);
  F32 a, b;
  L::load_two(up, a, b);
  L::store_two(y, L::mul(found(values, at.a), a), L::mul(found(values, at.b), b));
}

template <class T>
[[gnu::always_inline]] inline void backward_block(const float* values, const float* slopes,
                                                  const T* dy, const T* gate, const T* up, T* dgate,
                                                  T* dup) {
  const Places at = places_of(gate);
  F32 u0, u1, d0, d1;
  L::load_two(up, u0, u1);
  L::load_two(dy, d0, d1);
  L::store_two(dgate, L::mul(L::mul(d0, u0), found(slopes, at.a)),
               L::mul(L::mul(d1, u1), found(slopes, at.b)));
  L::store_two(dup, L::mul(d0, found(values, at.a)), L::mul(d1, found(values, at.b)));
}

// The last elements of a row, and then zeros.
template <class T>
struct Rest {
  T elements[kBlock] = {};
  Rest(const T* p, std::size_t count) { __builtin_memcpy(elements, p, count * sizeof(T)); }
};

template <class T, template <class> class F>
void looked_up_row(const GatedForward& job, std::size_t row, std::size_t begin, std::size_t end) {
  const T* gate = static_cast<const T*>(job.gate) + row * job.gate_stride + begin;
  const T* up = static_cast<const T*>(job.up) + row * job.up_stride + begin;
  T* y = static_cast<T*>(job.y) + row * job.cols + begin;
  const Table<T, F>& known = table<T, F>();
  const std::size_t size = end - begin;
  std::size_t i = 0;
  for (; i + kBlock <= size; i += kBlock) forward_block(known.values, gate + i, up + i, y + i);
  if (i == size) return;
  const Rest<T> g(gate + i, size - i), u(up + i, size - i);
  T out[kBlock];
  forward_block(known.values, g.elements, u.elements, out);
  __builtin_memcpy(y + i, out, (size - i) * sizeof(T));
}

template <class T, template <class> class F>
void looked_up_backward_row(const GatedBackward& job, std::size_t row, std::size_t begin,
                            std::size_t end) {
  const T* dy = static_cast<const T*>(job.dy) + row * job.dy_stride + begin;
  const T* gate = static_cast<const T*>(job.gate) + row * job.gate_stride + begin;
  const T* up = static_cast<const T*>(job.up) + row * job.up_stride + begin;
  T* dgate = static_cast<T*>(job.dgate) + row * job.cols + begin;
  T* dup = static_cast<T*>(job.dup) + row * job.cols + begin;
  const Table<T, F>& known = table<T, F>();
  const std::size_t size = end - begin;
  std::size_t i = 0;
  for (; i + kBlock <= size; i += kBlock)
    backward_block(known.values, known.slopes, dy + i, gate + i, up + i, dgate + i, dup + i);
  if (i == size) return;
  const Rest<T> d(dy + i, size - i), g(gate + i, size - i), u(up + i, size - i);
  T of_gate[kBlock], of_up[kBlock];
  backward_block(known.values, known.slopes, d.elements, g.elements, u.elements, of_gate, of_up);
  __builtin_memcpy(dgate + i, of_gate, (size - i) * sizeof(T));
  __builtin_memcpy(dup + i, of_up, (size - i) * sizeof(T));
}

template <class T, template <class> class F>
inline constexpr GatedKernels kLookedUp = {looked_up_row<T, F>, looked_up_backward_row<T, F>};

template <class T>
const GatedKernels* looked_up(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return &kLookedUp<T, Silu>;
    case Activation::kGeluTanh:
      return &kLookedUp<T, GeluTanh>;
    case Activation::kGelu:
      break;
  }
  return &kLookedUp<T, Gelu>;
}

}  // namespace

// nullptr for float32.
template <class V>
const GatedKernels* gated_activation_variant(DType dtype, Activation activation) {
  switch (dtype) {
    case DType::kBFloat16:
      return looked_up<Bf16>(activation);
    case DType::kFloat16:
      return looked_up<Fp16>(activation);
    case DType::kFloat32:
      break;
  }
  return nullptr;
}

template const GatedKernels* gated_activation_variant<simd::Amx>(DType, Activation);

}  // namespace monograph
