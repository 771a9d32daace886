"""The operators, one file each: wrapper, fake, and the portable implementation for devices without kernels.

`torch.ops.monograph.NAME` is the operator itself. Its CPU kernel is C++; on every other device the portable
implementation, written in aten operations, runs. Both give the same values.
"""

from monograph.ops import (
    adamw,
    causal_conv1d,
    choose_experts,
    combine_slots,
    dequantize,
    ep_experts,
    experts,
    experts_slots,
    gated_activation,
    gated_delta_rule,
    gram,
    linear,
    linear_cross_entropy,
    linear_log_probs,
    linear_scaled,
    linear_shared,
    offload,
    pack,
    providers,
    quantize,
    rms_norm,
    rms_norm_gated,
    rotary,
    rotary_angles,
    seeded_dropout,
    split_quantize,
    varlen_attention,
)

__all__ = [
    "adamw",
    "causal_conv1d",
    "choose_experts",
    "combine_slots",
    "dequantize",
    "ep_experts",
    "experts",
    "experts_slots",
    "gated_activation",
    "gated_delta_rule",
    "gram",
    "linear",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_scaled",
    "linear_shared",
    "offload",
    "pack",
    "quantize",
    "rms_norm",
    "rms_norm_gated",
    "rotary",
    "rotary_angles",
    "seeded_dropout",
    "split_quantize",
    "varlen_attention",
]

providers.load()
