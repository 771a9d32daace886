"""Rotary embeddings of a transformers model on rotary_angles.

cos and sin are then those of float64, rounded: no bit depends on the processor, and a program without torch
computes the same. So are the frequencies: the module's buffer gets those of `rotary_frequencies`, if the two
agree to a few units of float32; values written to it later are used. Kinds whose frequencies follow
the length of a batch (dynamic, longrope) stay. A module with a table for each type of layer (Gemma 3) is
taken over if all of its tables can be.
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
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return _angles(self, None, x, position_ids) or super().forward(x, position_ids)


class FusedLayerRotary(nn.Module):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str) -> Any:
        return _angles(self, layer_type, x, position_ids) or super().forward(x, position_ids, layer_type)


def _name(layer_type: str | None, attribute: str) -> str:
    return attribute if layer_type is None else f"{layer_type}_{attribute}"


def _angles(module: Any, layer_type: str | None, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
    """None where the operator has no kernel."""
    frequencies = getattr(module, _name(layer_type, "inv_freq"))
    here = runs_here("rotary_angles", x) and position_ids.dtype == torch.int64 and position_ids.dim() == 2
    if not here or frequencies.dtype != torch.float32 or frequencies.device != x.device:
        return None
    scaling = getattr(module, _name(layer_type, "attention_scaling"))
    return rotary_angles(position_ids, frequencies, scaling, x.dtype)


def take_rotary(module: Any) -> bool:
    kind: Any = getattr(module, "rope_type", None)
    types: tuple[str | None, ...] = tuple(kind) if isinstance(kind, dict) else (None,)
    fused = FusedLayerRotary if isinstance(kind, dict) else FusedRotary
    known = (
        type(module).__name__.endswith("RotaryEmbedding")
        and "forward" not in module.__dict__
        and types != ()
        and not parameters_of(module)
        and not list(module.children())
        and set(buffers_of(module))
        <= {_name(each, name) for each in types for name in ("inv_freq", "original_inv_freq")}
        and lies_where("rotary_angles", module)
        and list(inspect.signature(type(module).forward).parameters)
        == list(inspect.signature(fused.forward).parameters)
    )
    if not known:
        return False
    own = [_frequencies(module, each) for each in types]
    if any(table is None for table in own) or not all(_agrees(module, each) for each in types):
        return False
    for each, table in zip(types, own, strict=True):
        getattr(module, _name(each, "inv_freq")).copy_(table)
    put_before(fused, module)
    return True


def _frequencies(module: Any, layer_type: str | None) -> torch.Tensor | None:
    """Ours for its config, if they are the module's but for a few units of float32."""
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    scaling = getattr(module, _name(layer_type, "attention_scaling"), None)
    buffer: Any = buffers_of(module).get(_name(layer_type, "inv_freq"))
    plain = buffer is not None and buffer.dim() == 1 and buffer.dtype == torch.float32 and not buffer.is_meta
    if not plain or kind not in ROPE_KINDS or not isinstance(scaling, float | int):
        return None
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    if layer_type is not None and isinstance(parameters, dict):
        parameters = parameters.get(layer_type)
    if not isinstance(parameters, dict) or not isinstance(parameters.get("rope_theta"), float | int):
        return None
    if "mrope_section" in parameters:  # three positions for each token
        return None
    own = tried(rotary_frequencies, kind, 2 * buffer.numel(), parameters)
    fits = own is not None and bool(((own - buffer.cpu()).abs() <= 2**-20 * buffer.cpu().abs()).all())
    return own if fits else None


def _agrees(module: Any, layer_type: str | None) -> bool:
    """Its own forward is the cosine and sine of position * frequency."""
    positions = (_POSITIONS * draw(0, 2, 16).abs()).to(torch.int64)
    buffer: Any = getattr(module, _name(layer_type, "inv_freq"))
    scaling = float(getattr(module, _name(layer_type, "attention_scaling")))
    which = () if layer_type is None else (layer_type,)
    for dtype in (torch.float32, torch.bfloat16):
        x = draw(1, 2, 16, 8).to(dtype)
        want = tried(type(module).forward, module, x.to(buffer.device), positions.to(buffer.device), *which)
        if not isinstance(want, tuple) or len(want) != 2:
            return False
        got = rotary_angles(positions, buffer.cpu(), scaling, dtype)
        slack = torch.finfo(dtype).eps
        for one, other in zip(got, want, strict=True):
            if not isinstance(other, torch.Tensor) or other.dtype != dtype or other.shape != one.shape:
                return False
            if (one - other.cpu()).abs().max() > slack * max(1.0, scaling):
                return False
    return True
