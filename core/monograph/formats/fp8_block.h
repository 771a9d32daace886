// FP8 with 128 x 128 blocks, as DeepSeek, Qwen and compressed-tensors ship it: E4M3 elements and
// one scale for each 128 x 128 block of a matrix. The grid starts at the matrix's first element;
// the last blocks of a row or column may be partial. Scales are fp32, bf16 or E8M0, multipliers all
// (`weight_scale_inv` too, whatever its name says).
//   decode: value(code) * scale, one rounding to fp32, one to the output type.
//   encode, with m the block's largest magnitude:
//     absmax              s = m / 448, 1 for a block of zeros
//     compressed-tensors  the same, 2^-23 for a block of zeros
//     transformers        f = (1 / m) * 448, s = 1 / f, 1 for a block of zeros
//     transformer-engine  f = 448 / m rounded down to a power of two, s = 1 / f, 1 for zeros
//   s is rounded to bf16, or up to a power of two for E8M0, before it is used. Then v = x / s; for
//   transformers and transformer-engine v = x * (1 / s), or x * f where s is fp32. v is rounded to
//   the nearest E4M3, ties to even, saturating at 448.
// A block so small that s or its inverse is not finite counts as a block of zeros.
#pragma once

#include <cstring>

#include "monograph/formats/e4m3_bytes.h"
#include "monograph/formats/e8m0.h"
#include "monograph/formats/packed_view.h"
#include "monograph/formats/scaling.h"

namespace monograph {

struct Fp8Block : E4m3Format<Fp8Block> {
  static constexpr Format kFormat = Format::kFp8Block;
  static constexpr BlockShape kShape = BlockShape::kSquare;
  static constexpr std::size_t kBlock = 128;

  // Every NaN scale becomes the same NaN: a product of two different ones would depend on the order
  // of its factors.
  [[gnu::always_inline]] static float block_scale(const PackedView& weight, std::size_t block) {
    const ScalesView& scales = weight.scales;
    if (scales.kind == ScaleKind::kE8m0) return e8m0_value(scales.blocks[block]);
    float s;
    if (scales.kind == ScaleKind::kBf16) {
      Bf16 stored;
      std::memcpy(&stored, scales.blocks + 2 * block, sizeof stored);
      s = to_float(stored);
    } else {
      s = load_f32(scales.blocks + 4 * block);
    }
    return s != s ? std::bit_cast<float>(0x7fc00000u) : s;
  }

  [[gnu::always_inline]] static BlockScale choose_scale(const RuleContext& context, float absmax) {
    const bool inverse =
        context.rule == ScaleRule::kTransformers || context.rule == ScaleRule::kTransformerEngine;
    float s = absmax / 448.0f, factor = (1.0f / absmax) * 448.0f;
    if (context.rule == ScaleRule::kTransformerEngine)
      factor = std::bit_cast<float>(std::bit_cast<std::uint32_t>(448.0f / absmax) & 0x7f800000u);
    if (inverse) s = 1.0f / factor;
    const auto usable = [](float x) { return x > 0.0f && x <= 0x1.fffffep127f; };
    if (!usable(s) || !usable(1.0f / s)) {
      s = context.rule == ScaleRule::kCompressedTensors ? 0x1p-23f : 1.0f;
      factor = 1.0f / s;
    }
    if (context.kind == ScaleKind::kE8m0) {
      const std::uint8_t b = e8m0_ceil(s);
      return {b, {e8m0_reciprocal(b), /*divide=*/false, -0.0f}};
    }
    if (context.kind == ScaleKind::kBf16) {
      const Bf16 stored = from_float<Bf16>(s);
      const float rounded = to_float(stored);
      if (inverse) return {stored.bits, {1.0f / rounded, /*divide=*/false, -0.0f}};
      return {stored.bits, {rounded, /*divide=*/true, -0.0f}};
    }
    const std::uint32_t stored = std::bit_cast<std::uint32_t>(s);
    if (inverse) return {stored, {factor, /*divide=*/false, -0.0f}};
    return {stored, {s, /*divide=*/true, -0.0f}};
  }
};

}  // namespace monograph
