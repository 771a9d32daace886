// Formats with groups of a row (BlockShape::kGroup), by the rules of formats/row_groups.h. A row is
// one thread's, so that groups may share a byte.
#pragma once

#include <bit>
#include <cstring>

#include "monograph/base/float_types.h"
#include "monograph/formats/row_groups.h"
#include "monograph/kernels/quantize/quantize.h"

namespace monograph {

// x rounded to T; not a NaN, and no finite number that T does not reach. No branch: loops of it
// become vectors.
template <class T>
[[gnu::always_inline]] inline float rounded_to(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  if constexpr (dtype_of<T> == DType::kBFloat16) {
    return std::bit_cast<float>((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u);
  } else if constexpr (dtype_of<T> == DType::kFloat16) {
    const std::uint32_t a = u & 0x7fffffffu;
    const std::uint32_t normal = (a + 0xfff + ((a >> 13) & 1)) & ~0x1fffu;
    // Adding 0.5 aligns the last bit of the sum with 2^-24.
    const auto small = std::bit_cast<std::uint32_t>((std::bit_cast<float>(a) + 0.5f) - 0.5f);
    return std::bit_cast<float>((u & 0x80000000u) | (a < 0x38800000u ? small : normal));
  } else {
    return x;
  }
}

// Any number, overflow to infinity.
template <class T>
[[gnu::always_inline]] inline float through(float x) {
  return to_float(from_float<T>(x));
}

struct GroupRange {
  float lowest = 0.0f, highest = 0.0f;  // 0 lies between them
};

// Floats in their order as integers; -0 before +0.
[[gnu::always_inline]] inline std::int32_t ordered_bits(float x) {
  const auto bits = std::bit_cast<std::int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
[[gnu::always_inline]] inline float from_ordered_bits(std::int32_t bits) {
  return std::bit_cast<float>(bits ^ ((bits >> 31) & 0x7fffffff));
}

template <class T>
[[gnu::always_inline]] inline GroupRange range_of(const T* in, std::size_t count) {
  std::int32_t lowest = 0, highest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t x = ordered_bits(to_float(in[i]));
    lowest = x < lowest ? x : lowest;
    highest = x > highest ? x : highest;
  }
  return {from_ordered_bits(lowest), from_ordered_bits(highest)};
}

[[gnu::always_inline]] inline bool is_finite_number(float x) {
  return (std::bit_cast<std::uint32_t>(x) & 0x7fffffff) < 0x7f800000;
}

// V keeps the functions of two instruction sets apart for the linker.
template <class V, class T>
[[gnu::noinline]] GroupRange finite_range_of(const T* in, std::size_t count) {
  GroupRange range;
  for (std::size_t i = 0; i < count; ++i) {
    const float x = to_float(in[i]);
    if (!is_finite_number(x)) continue;
    range.lowest = x < range.lowest ? x : range.lowest;
    range.highest = x > range.highest ? x : range.highest;
  }
  return range;
}

// What a scale of this kind is stored as, and what is then read.
struct StoredScale {
  std::uint32_t bits;
  float value;
};
[[gnu::always_inline]] inline StoredScale as_stored(ScaleKind kind, float s) {
  if (kind == ScaleKind::kBf16) {
    const Bf16 stored = from_float<Bf16>(s);
    return {stored.bits, to_float(stored)};
  }
  if (kind == ScaleKind::kFp16) {
    const Fp16 stored = from_float<Fp16>(s);
    return {stored.bits, to_float(stored)};
  }
  return {std::bit_cast<std::uint32_t>(s), s};
}

struct GroupScale {
  StoredScale scale;
  float zero;
};

template <class F, class T>
[[gnu::always_inline]] inline GroupScale choose_group_scale(const QuantizeJob& job,
                                                            const GroupRange& range) {
  constexpr float kSteps = F::kHighest - F::kLowest;
  const bool with_zero = job.rule == ScaleRule::kMinMax;
  float s;
  if (with_zero) {
    const float width = through<T>(range.highest - range.lowest);
    s = is_finite_number(width) ? width / kSteps : range.highest / kSteps - range.lowest / kSteps;
  } else {
    s = (-range.lowest > range.highest ? -range.lowest : range.highest) / (kSteps / 2);
  }
  GroupScale found = {as_stored(job.kind, through<T>(s)), 0.0f};
  if (with_zero) {
    const float zero = through<T>(F::kLowest - through<T>(range.lowest / found.scale.value));
    const float in_range = zero < F::kLowest ? F::kLowest : zero > F::kHighest ? F::kHighest : zero;
    found.zero = zero != zero ? 0.0f : static_cast<float>(nearest_integer(in_range));
  }
  if (found.scale.value == 0.0f) {
    const float epsilon = job.kind == ScaleKind::kBf16   ? 0x1p-7f
                          : job.kind == ScaleKind::kFp16 ? 0x1p-10f
                                                         : 0x1p-23f;
    found.scale = as_stored(job.kind, epsilon);
  }
  return found;
}

// A NaN counts as 0.
template <class F, class T, bool kFinite>
[[gnu::always_inline]] inline void group_codes(const T* in, std::size_t count, float scale,
                                               float zero, std::uint8_t flip, std::uint8_t* out) {
  for (std::size_t i = 0; i < count; ++i) {
    float x = to_float(in[i]);
    if constexpr (!kFinite) x = x != x ? 0.0f : x;
    const float number = rounded_to<T>(rounded_to<T>(x / scale) + zero);
    const float above = number < F::kLowest ? F::kLowest : number;
    const std::uint8_t code = F::code_of(above > F::kHighest ? F::kHighest : above);
    out[i] = static_cast<std::uint8_t>(code ^ flip);
  }
}

// Codes of columns from `col` on into the nibbles of a row; what is behind the last is 0.
[[gnu::always_inline]] inline void store_nibbles(const std::uint8_t* codes, std::size_t col,
                                                 std::size_t count, std::uint8_t* row) {
  std::size_t i = 0;
  if (col % 2 != 0 && count != 0) {
    row[col / 2] = static_cast<std::uint8_t>((row[col / 2] & 15) | codes[0] << 4);
    i = 1;
  }
  std::uint8_t* out = row + (col + i) / 2;
  for (; i + 1 < count; i += 2) *out++ = static_cast<std::uint8_t>(codes[i] | codes[i + 1] << 4);
  if (i < count) *out = codes[i];
}

template <class F, class V, class T>
[[gnu::always_inline]] inline std::size_t quantize_group_rows(const QuantizeJob& job,
                                                              std::size_t first, std::size_t last) {
  constexpr std::size_t kTile = 256;
  constexpr bool kNibbles = F::kFormat == Format::kInt4Bf16;
  const std::size_t groups = job.cols / job.block, scale_bytes = size_bytes(job.kind);
  const std::uint8_t flip = job.add_half ? 0x80 : 0;
  for (std::size_t block = first; block < last; ++block) {
    const std::size_t row = block / groups, begin = block % groups * job.block;
    const T* in = static_cast<const T*>(job.input) + row * job.cols + begin;
    std::uint8_t* out = job.values + row * job.row_bytes;
    const std::uint32_t largest = V::absmax_bits(in, job.block);
    const bool finite = largest < 0x7f800000;
    GroupRange range;
    if (!finite) {
      for (std::size_t i = 0; job.nonfinite == NonFinite::kError; ++i)
        if (!is_finite_number(to_float(in[i]))) return row * job.cols + begin + i;
      range = finite_range_of<V>(in, job.block);
    } else if (job.rule == ScaleRule::kMinMax) {
      range = range_of(in, job.block);
    } else {
      range.highest = std::bit_cast<float>(largest);
    }
    const GroupScale chosen = choose_group_scale<F, T>(job, range);
    std::memcpy(job.scales + block * scale_bytes, &chosen.scale.bits, scale_bytes);
    if (job.zeros != nullptr)
      job.zeros[block] = static_cast<std::uint8_t>(static_cast<int>(chosen.zero));
    for (std::size_t done = 0; done < job.block; done += kTile) {
      const std::size_t count = job.block - done < kTile ? job.block - done : kTile;
      std::uint8_t codes[kTile];
      std::uint8_t* to = kNibbles ? codes : out + begin + done;
      if (finite)
        group_codes<F, T, true>(in + done, count, chosen.scale.value, chosen.zero, flip, to);
      else
        group_codes<F, T, false>(in + done, count, chosen.scale.value, chosen.zero, flip, to);
      if constexpr (kNibbles) store_nibbles(codes, begin + done, count, out);
    }
    const std::size_t used = kNibbles ? (job.cols + 1) / 2 : job.cols;
    if (begin + job.block == job.cols) std::memset(out + used, 0, job.row_bytes - used);
  }
  return kAllFinite;
}

}  // namespace monograph
