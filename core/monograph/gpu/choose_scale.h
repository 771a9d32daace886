// The scale that a rule chooses for a block, on a GPU: F::choose_scale of the format headers, which
// are host code. A test compares every rule of every format with them.
#pragma once

#include "monograph/formats/all.h"
#include "monograph/gpu/decode.h"

namespace monograph::gpu {

MONOGRAPH_DEVICE bool usable_scale(float s) { return s > 0.0f && s <= 0x1.fffffep127f; }

// mx_scale<E> of mx_scales.h.
template <class E>
MONOGRAPH_DEVICE std::uint8_t mx_scale_of(ScaleRule rule, float absmax) {
  constexpr std::int32_t kExponent =
      static_cast<std::int32_t>(E::kLargestCode >> E::kMantissa) - E::kBias;
  constexpr float kLargestValue = E::decode(E::kLargestCode);
  const std::uint32_t bits = as_bits(absmax);
  std::uint32_t added = 0;
  switch (rule) {
    case ScaleRule::kFloor:
      break;
    case ScaleRule::kCeil:
      added = 0x7fffff;
      break;
    case ScaleRule::kEven:
      added = 1u << (22 - E::kMantissa);
      break;
    case ScaleRule::kCompressedTensors:
      added = 1u << (22 - E2m1::kMantissa);
      break;
    case ScaleRule::kTransformerEngine:
      return e8m0_ceil(mul(absmax, 1.0f / kLargestValue));
    default:
      return e8m0_ceil(div(absmax, kLargestValue));
  }
  return e8m0_clamped(static_cast<std::int32_t>((bits + added) >> 23) - kExponent);
}

MONOGRAPH_DEVICE BlockScale power_scale(std::uint8_t b) {
  return {b, {e8m0_reciprocal(b), /*divide=*/false, -0.0f}};
}

MONOGRAPH_DEVICE BlockScale fp8_block_scale(const RuleContext& context, float absmax) {
  const bool inverse =
      context.rule == ScaleRule::kTransformers || context.rule == ScaleRule::kTransformerEngine;
  float s = div(absmax, 448.0f), factor = mul(div(1.0f, absmax), 448.0f);
  if (context.rule == ScaleRule::kTransformerEngine)
    factor = as_float(as_bits(div(448.0f, absmax)) & 0x7f800000u);
  if (inverse) s = div(1.0f, factor);
  if (!usable_scale(s) || !usable_scale(div(1.0f, s))) {
    s = context.rule == ScaleRule::kCompressedTensors ? 0x1p-23f : 1.0f;
    factor = div(1.0f, s);
  }
  if (context.kind == ScaleKind::kE8m0) return power_scale(e8m0_ceil(s));
  std::uint32_t stored = as_bits(s);
  if (context.kind == ScaleKind::kBf16) {
    stored = round_to<Bf16>(s).bits;
    s = as_float(stored << 16);
    factor = div(1.0f, s);
  }
  if (inverse) return {stored, {factor, /*divide=*/false, -0.0f}};
  return {stored, {s, /*divide=*/true, -0.0f}};
}

// What is rounded to E4M3: at least `low`, at most 448.
MONOGRAPH_DEVICE float nvfp4_rounded(float s, float low) {
  s = s > low ? s : low;
  return e4m3_value(E4m3::encode(s < 448.0f ? s : 448.0f));
}

MONOGRAPH_DEVICE BlockScale nvfp4_block_scale(const RuleContext& context, float absmax) {
  const float encode = context.tensor.encode, decode = context.tensor.decode;
  float s, factor;
  bool multiply = true;
  if (context.rule == ScaleRule::kTorchao) {
    s = nvfp4_rounded(div(div(absmax, 6.0f), decode), 0x1p-6f);
    factor = div(encode, s);
  } else if (context.rule == ScaleRule::kTransformerEngine) {
    s = nvfp4_rounded(mul(absmax, mul(encode, 1.0f / 6.0f)), 0.0f);
    factor = div(1.0f, mul(s, div(1.0f, encode)));
    if (!(factor < 0x1.fffffep127f)) factor = 0x1.fffffep127f;
  } else {
    multiply = false;
    if (context.rule == ScaleRule::kCompressedTensors) {
      s = nvfp4_rounded(mul(encode, div(absmax, 6.0f)), 0.0f);
      if (s == 0.0f) s = 0.125f;
      factor = div(s, encode);
    } else {
      const float ratio = div(absmax, mul(6.0f, decode));
      s = nvfp4_rounded(ratio == 0.0f ? 1.0f : ratio, 0x1p-9f);
      factor = mul(s, decode);
    }
  }
  // Rules that divide drop the sign of a zero.
  return {E4m3::encode(s), {factor, !multiply, multiply ? -0.0f : 0.0f}};
}

template <class F>
MONOGRAPH_DEVICE BlockScale choose_block_scale(const RuleContext& context, float absmax) {
  if constexpr (F::kFormat == Format::kNvfp4)
    return nvfp4_block_scale(context, absmax);
  else if constexpr (F::kFormat == Format::kFp8Block)
    return fp8_block_scale(context, absmax);
  else
    return power_scale(mx_scale_of<typename F::Element>(context.rule, absmax));
}

// Nvfp4::choose_tensor_scale.
MONOGRAPH_DEVICE TensorScales nvfp4_tensor_scales(ScaleRule rule, float absmax) {
  constexpr float kLargest = Nvfp4::kLargestScaled;
  const bool theirs = rule == ScaleRule::kCompressedTensors;
  const bool from_encode = theirs || rule == ScaleRule::kTransformerEngine;
  const float encode = theirs ? mul(div(1.0f, absmax), kLargest) : div(kLargest, absmax);
  const float first = from_encode ? encode : div(absmax, kLargest);
  const float second = div(1.0f, first);
  if (!usable_scale(first) || !usable_scale(second)) return {1.0f, 1.0f};
  return from_encode ? TensorScales{first, second} : TensorScales{second, first};
}

}  // namespace monograph::gpu
