// NVFP4: E2M1 elements, the even one in the low nibble, one E4M3 scale for 16 elements of a row and
// one fp32 scale for the whole matrix; rows are a multiple of 16. Two formats, one for each way the
// matrix's scale is stored:
//   nvfp4         multiplies: ModelOpt's weight_scale_2, torchao's per_tensor_scale
//   nvfp4-divide  divides: compressed-tensors' weight_global_scale
// Without a tensor scale it counts as 1.
//   decode: scale = E4M3 * tensor (or / tensor), rounded to fp32; element = value(code) * scale,
//   one rounding to fp32, one to the output type.
//   encode, with m the block's largest magnitude, M the matrix's, and 2688 = 6 * 448:
//     torchao             decode = M / 2688, encode = 1 / decode;
//                         s = e4m3(clamp(m / 6 / decode, 2^-6, 448)); v = x * (encode / s)
//     modelopt            decode as torchao; s = e4m3(clamp(m / (6 * decode), 2^-9, 448)), from 1
//                         for a block of zeros; v = x / (s * decode); a zero v has no sign
//     compressed-tensors  encode = (1 / M) * 2688; s = e4m3(min(encode * (m / 6), 448)), 1/8 for 0;
//                         v = x / (s / encode); a zero v has no sign
//     transformer-engine  encode = 2688 / M; s = e4m3(min(m * (encode * (1 / 6)), 448));
//                         v = x * min(1 / (s * (1 / encode)), largest fp32)
//   Each step is rounded to fp32. v is rounded to the nearest E2M1, ties to even, saturating. A
//   matrix of zeros, or so small that a scale or its inverse is not finite, has tensor scale 1.
#pragma once

#include "monograph/base/float_types.h"
#include "monograph/formats/e2m1_table.h"
#include "monograph/formats/scaling.h"

namespace monograph {

struct Nvfp4 : E2m1Format<Nvfp4> {
  static constexpr Format kFormat = Format::kNvfp4;
  static constexpr BlockShape kShape = BlockShape::kRow;
  static constexpr std::size_t kBlock = 16;
  static constexpr float kLargestScaled = 2688.0f, kLargestFloat = 0x1.fffffep127f;

  [[gnu::always_inline]] static float scale_of(const ScalesView& scales, std::uint8_t stored,
                                               std::size_t tensor) {
    const float s = kE4m3Values.values[stored];
    if (scales.tensor == nullptr) return s;
    const float t = load_f32(scales.tensor + 4 * tensor);
    return scales.tensor_divides ? s / t : s * t;
  }

  [[gnu::always_inline]] static float block_scale(const PackedView& weight, std::size_t block) {
    const ScalesView& scales = weight.scales;
    const std::size_t tensor = scales.blocks_per_tensor == 0 ? 0 : block / scales.blocks_per_tensor;
    return scale_of(scales, scales.blocks[block], tensor);
  }

  [[gnu::always_inline]] static TensorScales choose_tensor_scale(ScaleRule rule, float absmax) {
    const bool theirs = rule == ScaleRule::kCompressedTensors;
    const bool from_encode = theirs || rule == ScaleRule::kTransformerEngine;
    const float encode = theirs ? (1.0f / absmax) * kLargestScaled : kLargestScaled / absmax;
    const float first = from_encode ? encode : absmax / kLargestScaled;
    const float second = 1.0f / first;
    const auto usable = [](float s) { return s > 0.0f && s <= kLargestFloat; };
    if (!usable(first) || !usable(second)) return {};
    return from_encode ? TensorScales{first, second} : TensorScales{second, first};
  }

  // How a rule's factor is used.
  [[gnu::always_inline]] static Scaling scaling(ScaleRule rule) {
    const bool multiply = rule == ScaleRule::kTorchao || rule == ScaleRule::kTransformerEngine;
    return multiply ? Scaling{1.0f, /*divide=*/false, -0.0f} : Scaling{1.0f, /*divide=*/true, 0.0f};
  }

  template <class Number>
  struct Chosen {
    Number scale, factor;
  };
  // For one block, or for one in every lane: L has F32, set, mul, div, min, max, e4m3 (the nearest
  // E4M3, as a number) and filled (the second where the first is zero).
  template <class L>
  [[gnu::always_inline]] static Chosen<typename L::F32> choose(const RuleContext& context,
                                                               typename L::F32 absmax) {
    using Number = typename L::F32;
    const Number encode = L::set(context.tensor.encode), decode = L::set(context.tensor.decode);
    const Number six = L::set(6.0f), one = L::set(1.0f);
    const auto rounded = [](Number s, float low) __attribute__((always_inline)) {
      return L::e4m3(L::min(L::max(s, L::set(low)), L::set(448.0f)));
    };
    if (context.rule == ScaleRule::kTorchao) {
      const Number s = rounded(L::div(L::div(absmax, six), decode), 0x1p-6f);
      return {s, L::div(encode, s)};
    }
    if (context.rule == ScaleRule::kTransformerEngine) {
      const Number s = rounded(L::mul(absmax, L::mul(encode, L::set(1.0f / 6.0f))), 0.0f);
      const Number factor = L::div(one, L::mul(s, L::div(one, encode)));
      return {s, L::min(factor, L::set(kLargestFloat))};
    }
    if (context.rule == ScaleRule::kCompressedTensors) {
      const Number s = rounded(L::mul(encode, L::div(absmax, six)), 0.0f);
      const Number filled = L::filled(s, L::set(0.125f));
      return {filled, L::div(filled, encode)};
    }
    const Number ratio = L::div(absmax, L::mul(six, decode));
    const Number s = rounded(L::filled(ratio, one), 0x1p-9f);
    return {s, L::mul(s, decode)};
  }

  // L of choose() for one number.
  struct One {
    using F32 = float;
    [[gnu::always_inline]] static float set(float x) { return x; }
    [[gnu::always_inline]] static float mul(float a, float b) { return a * b; }
    [[gnu::always_inline]] static float div(float a, float b) { return a / b; }
    [[gnu::always_inline]] static float min(float a, float b) { return a < b ? a : b; }
    [[gnu::always_inline]] static float max(float a, float b) { return a > b ? a : b; }
    [[gnu::always_inline]] static float e4m3(float x) {
      return kE4m3Values.values[E4m3::encode(x)];
    }
    [[gnu::always_inline]] static float filled(float a, float b) { return a == 0.0f ? b : a; }
  };
  [[gnu::always_inline]] static BlockScale choose_scale(const RuleContext& context, float absmax) {
    const Chosen<float> chosen = choose<One>(context, absmax);
    Scaling use = scaling(context.rule);
    use.factor = chosen.factor;
    return {E4m3::encode(chosen.scale), use};
  }
};

}  // namespace monograph
