"""Rotary embeddings of a transformers model on rotary_angles.

cos and sin are then those of float64, rounded: no bit depends on the processor, and a program without torch
computes the same. So are the frequencies: the module's buffer gets those of `rotary_frequencies`, if the two
agree to a few units of float32; values written to it later are used. Kinds whose frequencies follow
the length of a batch (dynamic, longrope) stay.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from monograph.hf.transformers.module_probe import draw, lies_where, runs_here, tried
from monograph.ops.rotary_angles import ROPE_KINDS, rotary_angles, rotary_frequencies
from monograph.upstream.instance_class import put_before
from monograph.upstream.torch_names import buffers_of, parameters_of

_POSITIONS = 4096


class FusedRotary(nn.Module):
    inv_freq: torch.Tensor
    attention_scaling: float

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        frequencies = self.inv_freq
        here = runs_here("rotary_angles", x) and position_ids.dtype == torch.int64 and position_ids.dim() == 2
        if not here or frequencies.dtype != torch.float32 or frequencies.device != x.device:
            return super().forward(x, position_ids)
        return rotary_angles(position_ids, frequencies, self.attention_scaling, x.dtype)


def take_rotary(module: Any) -> bool:
    known = (
        type(module).__name__.endswith("RotaryEmbedding")
        and "forward" not in module.__dict__
        and not parameters_of(module)
        and not list(module.children())
        and set(buffers_of(module)) <= {"inv_freq", "original_inv_freq"}
        and getattr(module, "rope_type", None) in ROPE_KINDS
        and isinstance(getattr(module, "attention_scaling", None), float | int)
        and lies_where("rotary_angles", module)
        and list(inspect.signature(type(module).forward).parameters) == ["self", "x", "position_ids"]
    )
    buffer: Any = buffers_of(module).get("inv_freq")
    if not known or buffer is None or buffer.dim() != 1 or buffer.dtype != torch.float32 or buffer.is_meta:
        return False
    own = _frequencies(module, buffer)
    if own is None or not _agrees(module):
        return False
    buffer.copy_(own)
    put_before(FusedRotary, module)
    return True


def _frequencies(module: Any, buffer: torch.Tensor) -> torch.Tensor | None:
    """Ours for its config, if they are the module's but for a few units of float32."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    if not isinstance(parameters, dict) or not isinstance(parameters.get("rope_theta"), float | int):
        return None
    if "mrope_section" in parameters:  # three positions for each token
        return None
    own = tried(rotary_frequencies, module.rope_type, 2 * buffer.numel(), parameters)
    fits = own is not None and bool(((own - buffer.cpu()).abs() <= 2**-20 * buffer.cpu().abs()).all())
    return own if fits else None


def _agrees(module: Any) -> bool:
    """Its own forward is the cosine and sine of position * frequency."""
    positions = (_POSITIONS * draw(0, 2, 16).abs()).to(torch.int64)
    frequencies = module.inv_freq.cpu()
    for dtype in (torch.float32, torch.bfloat16):
        x = draw(1, 2, 16, 8).to(dtype)
        want = tried(
            type(module).forward, module, x.to(module.inv_freq.device), positions.to(module.inv_freq.device)
        )
        if not isinstance(want, tuple) or len(want) != 2:
            return False
        got = rotary_angles(positions, frequencies, float(module.attention_scaling), dtype)
        slack = torch.finfo(dtype).eps
        for one, other in zip(got, want, strict=True):
            if not isinstance(other, torch.Tensor) or other.dtype != dtype or other.shape != one.shape:
                return False
            if (one - other.cpu()).abs().max() > slack * max(1.0, float(module.attention_scaling)):
                return False
    return True
