"""monograph::rotary_angles and rotary_frequencies: what rotary positions turn by.

    angle = position * frequency in float32;  cos, sin = those of float64 * scaling, rounded

as modules of transformers compute it, but for the cosine: theirs is float32's, whose last bit belongs to the
processor and to torch's version. Frequencies are computed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import check_tensors, dtype_name, require

# As in core/monograph/kernels/rotary/angles.h: transformers' names of rope_type.
ROPE_KINDS = {"default": 0, "linear": 1, "llama3": 2, "yarn": 3}
_SCALED = ("rope_theta", "factor")
_NEEDED = {
    "default": ("rope_theta",),
    "linear": _SCALED,
    "llama3": (*_SCALED, "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (*_SCALED, "original_max_position_embeddings"),
}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def rotary_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [..., 2 * frequencies], of positions [...] int64: all angles, and again behind them."""
    return torch.ops.monograph.rotary_angles(positions, frequencies, scaling, dtype)


def rotary_frequencies(kind: str, size: int, parameters: Mapping[str, Any]) -> torch.Tensor:
    """float32 [size / 2], of heads whose first `size` elements turn. parameters: transformers'
    `rope_parameters` of a kind in ROPE_KINDS."""
    op, get = "rotary_frequencies", parameters.get
    require(kind in ROPE_KINDS, op, f"the kind is {kind!r}, wanted one of {', '.join(ROPE_KINDS)}")
    missing = ", ".join(name for name in _NEEDED[kind] if not isinstance(get(name), float | int))
    require(not missing, op, f"{kind!r} has no number for {missing}")
    numbers = [
        parameters["rope_theta"],
        get("factor") or 1.0,
        get("low_freq_factor") or 1.0,
        get("high_freq_factor") or 4.0,
        get("original_max_position_embeddings") or 8192,
        get("beta_fast") or 32,
        get("beta_slow") or 1,
        get("truncate", True),
    ]
    found = torch.ops.monograph.rotary_frequencies(ROPE_KINDS[kind], size, [float(n) for n in numbers])
    return torch.tensor(found, dtype=torch.float32)


def _check(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Size, torch.dtype]:
    op = "rotary_angles"
    check_tensors(op, positions=positions, frequencies=frequencies)
    found = dtype_name(positions.dtype)
    require(positions.dtype == torch.int64, op, f"positions is {found}, wanted int64")
    found = f"{dtype_name(frequencies.dtype)} of {frequencies.dim()} dimensions"
    fits = frequencies.dtype == torch.float32 and frequencies.dim() == 1
    require(fits, op, f"frequencies is {found}, wanted float32 of one")
    require(dtype in _FLOATS, op, f"the output is {dtype}, wanted bfloat16, float16 or float32")
    return torch.Size([*positions.shape, 2 * frequencies.shape[0]]), dtype


@torch.library.register_fake("monograph::rotary_angles")
def _(positions, frequencies, scaling, dtype):  # type: ignore[no-untyped-def]
    shape, dtype = _check(positions, frequencies, dtype)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


def portable_rotary_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator in aten operations, for any device that has float64."""
    _check(positions, frequencies, dtype)
    angles = (positions[..., None].float() * frequencies).double()
    angles = torch.cat((angles, angles), dim=-1)
    return tuple((f(angles) * scaling).float().to(dtype) for f in (torch.cos, torch.sin))  # type: ignore[return-value]


torch.library.impl("monograph::rotary_angles", "CompositeExplicitAutograd")(portable_rotary_angles)
