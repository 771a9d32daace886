// Formats whose elements are small floating-point numbers (F::Element): the rule chooses a scale
// for the block's largest magnitude, then each element is divided by it and rounded.
#pragma once

#include <bit>
#include <cstring>

#include "monograph/base/float_types.h"
#include "monograph/formats/runs.h"
#include "monograph/kernels/quantize/quantize.h"
#include "monograph/kernels/quantize/strip.h"
#include "monograph/simd/scalar.h"

namespace monograph {

inline constexpr std::uint32_t kInfinityBits = 0x7f800000;

// Where a block lies in the input: `rows` pieces of `width` elements, `stride` apart.
struct BlockRectangle {
  std::size_t begin, rows, width, stride;
};

template <class F>
[[gnu::always_inline]] inline BlockRectangle rectangle_of(const QuantizeJob& job,
                                                          std::size_t block) {
  if constexpr (F::kShape != BlockShape::kSquare) {
    return {block * F::kBlock, 1, F::kBlock, 0};
  } else {
    const std::size_t across = ceil_div(job.cols, F::kBlock);
    const std::size_t down = ceil_div(job.matrix_rows, F::kBlock);
    const std::size_t matrix = block / (across * down);
    const std::size_t row = block / across % down * F::kBlock, col = block % across * F::kBlock;
    const std::size_t rows = job.matrix_rows - row, width = job.cols - col;
    return {(matrix * job.matrix_rows + row) * job.cols + col, rows < F::kBlock ? rows : F::kBlock,
            width < F::kBlock ? width : F::kBlock, job.cols};
  }
}

// Known to the compiler where it cannot vary.
template <class F>
[[gnu::always_inline]] inline std::size_t width_of(const BlockRectangle& r) {
  return F::kShape == BlockShape::kSquare ? r.width : F::kBlock;
}

// The code of one element; a NaN counts as 0, an infinity as the largest value.
template <class F>
[[gnu::always_inline]] inline std::uint32_t element_code(float x, const Scaling& scaling) {
  const std::uint32_t a = std::bit_cast<std::uint32_t>(x) & 0x7fffffff;
  if (a > kInfinityBits) return 0;
  return F::Element::encode(a == kInfinityBits ? x : simd::Scalar::scaled(x, scaling));
}

// `width` elements one at a time: tails, and blocks that hold non-finite elements.
template <class F, class V, class T>
[[gnu::always_inline]] inline void encode_one_by_one(const T* in, std::size_t width,
                                                     const Scaling& scaling, std::uint8_t* out) {
  if constexpr (F::kPerByte == 1) {
    for (std::size_t i = 0; i < width; ++i)
      out[i] = static_cast<std::uint8_t>(element_code<F>(to_float(in[i]), scaling));
  } else {
    for (std::size_t i = 0; i < width; i += 2)
      out[i / 2] = static_cast<std::uint8_t>(element_code<F>(to_float(in[i]), scaling) |
                                             element_code<F>(to_float(in[i + 1]), scaling) << 4);
  }
}

// Blocks taken together: neighbours in a row of square blocks, so that each row of the weight is
// read in one long piece.
template <class F>
inline constexpr std::size_t kTogether = F::kShape == BlockShape::kSquare ? 16 : 1;

template <class F>
[[gnu::always_inline]] inline std::size_t blocks_together(const QuantizeJob& job, std::size_t block,
                                                          std::size_t last) {
  if constexpr (kTogether<F> == 1) return 1;
  const std::size_t across = ceil_div(job.cols, F::kBlock);
  std::size_t count = across - block % across;
  count = count < last - block ? count : last - block;
  return count < kTogether<F> ? count : kTogether<F>;
}

// The scale of the matrix that a block lies in, for blocks asked in order.
class TensorOfBlock {
 public:
  [[gnu::always_inline]] TensorOfBlock(const QuantizeJob& job, std::size_t block)
      : next_(job.tensors), per_tensor_(job.blocks_per_tensor) {
    if (next_ == nullptr) return;
    next_ += block / per_tensor_;
    left_ = per_tensor_ - block % per_tensor_;
  }
  [[gnu::always_inline]] TensorScales next() {
    advance();
    const TensorScales found = scales();
    skip(1);
    return found;
  }
  // Whether the next `blocks` blocks lie in one matrix: scales() is then for all of them, and
  // skip(blocks) goes past them.
  [[gnu::always_inline]] bool reaches(std::size_t blocks) {
    advance();
    return next_ == nullptr || left_ >= blocks;
  }
  [[gnu::always_inline]] TensorScales scales() const {
    return next_ == nullptr ? TensorScales{} : *next_;
  }
  [[gnu::always_inline]] void skip(std::size_t blocks) { left_ -= next_ == nullptr ? 0 : blocks; }

 private:
  [[gnu::always_inline]] void advance() {
    if (next_ == nullptr || left_ != 0) return;
    ++next_;
    left_ = per_tensor_;
  }

  const TensorScales* next_;
  std::size_t per_tensor_, left_ = 0;
};

// A copy of as many bytes as the kind has would be a call for each block.
template <class F>
[[gnu::always_inline]] inline void store_scale(const QuantizeJob& job, std::size_t block,
                                               std::uint32_t stored) {
  if (F::kShape != BlockShape::kSquare || job.kind == ScaleKind::kE8m0) {
    job.scales[block] = static_cast<std::uint8_t>(stored);
  } else if (job.kind == ScaleKind::kBf16) {
    std::memcpy(job.scales + 2 * block, &stored, 2);
  } else {
    std::memcpy(job.scales + 4 * block, &stored, 4);
  }
}

// Under NonFinite::kSaturate: the largest magnitude among the finite elements. Else the index of
// the first that is not finite, through `bad`.
template <class F, class V, class T>
[[gnu::noinline]] std::uint32_t examine_nonfinite(const QuantizeJob& job, const BlockRectangle& r,
                                                  std::size_t& bad) {
  std::uint32_t largest = 0;
  for (std::size_t row = 0; row < r.rows; ++row) {
    const std::size_t begin = r.begin + row * r.stride;
    for (std::size_t i = begin; i < begin + r.width; ++i) {
      const float x = to_float(static_cast<const T*>(job.input)[i]);
      const std::uint32_t a = std::bit_cast<std::uint32_t>(x) & 0x7fffffff;
      if (a < kInfinityBits) {
        largest = a > largest ? a : largest;
      } else if (job.nonfinite == NonFinite::kError) {
        bad = i;
        return 0;
      }
    }
  }
  return largest;
}

template <class F, class V, class T>
[[gnu::always_inline]] inline std::size_t quantize_element_blocks(const QuantizeJob& job,
                                                                  std::size_t first,
                                                                  std::size_t last) {
  using Element = typename F::Element;
  const T* input = static_cast<const T*>(job.input);
  RuleContext context = {job.rule, job.kind, {}};
  TensorOfBlock tensor(job, first);
  for (std::size_t block = first; block < last;) {
    if constexpr (Strip<F, V, T>::kBlocks != 0) {
      constexpr std::size_t kStrip = Strip<F, V, T>::kBlocks;
      if (last - block >= kStrip && tensor.reaches(kStrip)) {
        context.tensor = tensor.scales();
        if (Strip<F, V, T>::quantize(job, block, context)) {
          tensor.skip(kStrip);
          block += kStrip;
          continue;
        }
      }
    }
    const std::size_t count = blocks_together<F>(job, block, last);
    const std::size_t rows = rectangle_of<F>(job, block).rows;
    BlockRectangle r[kTogether<F>];
    std::uint32_t bits[kTogether<F>];
    Scaling scaling[kTogether<F>];
    bool finite[kTogether<F>];
    for (std::size_t b = 0; b < count; ++b) {
      r[b] = rectangle_of<F>(job, block + b);
      bits[b] = 0;
    }
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t b = 0; b < count; ++b) {
        const T* in = input + r[b].begin + row * r[b].stride;
        const std::uint32_t found = V::absmax_bits(in, width_of<F>(r[b]));
        bits[b] = found > bits[b] ? found : bits[b];
      }
    for (std::size_t b = 0; b < count; ++b) {
      finite[b] = bits[b] < kInfinityBits;
      std::size_t bad = kAllFinite;
      if (!finite[b]) bits[b] = examine_nonfinite<F, V, T>(job, r[b], bad);
      if (bad != kAllFinite) return bad;
      context.tensor = tensor.next();
      const BlockScale chosen = F::choose_scale(context, std::bit_cast<float>(bits[b]));
      store_scale<F>(job, block + b, chosen.stored);
      scaling[b] = chosen.scaling;
      if (scaling[b].divide) with_inverse(scaling[b]);
    }
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t b = 0; b < count; ++b) {
        const std::size_t at = r[b].begin + row * r[b].stride, width = width_of<F>(r[b]);
        const T* in = input + at;
        std::uint8_t* out = job.values + at / F::kPerByte;
        std::size_t i = 0;
        if (finite[b])
          for (; i + V::kEncodeAs <= width; i += V::kEncodeAs)
            V::template encode_as<Element>(in + i, scaling[b], out + i / F::kPerByte);
        encode_one_by_one<F, V>(in + i, width - i, scaling[b], out + i / F::kPerByte);
      }
    block += count;
  }
  return kAllFinite;
}

}  // namespace monograph
