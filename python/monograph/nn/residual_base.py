"""PiSSA and LoftQ on packed weights: the start of an adapter, and the base that it leaves.

    PiSSA   A, B: the first r singular directions of W.    base: quantise(W - s B A)
    LoftQ   repeat: base = quantise(W - s B A); A, B: the first r singular directions of (W - base) / s

W is the dense weight that was quantised if its place is known (`QuantLinear.dense_source`; an error if it has
gone from there), else what the packed base stands for. Every base is a function of W and one pair of factors,
in fixed order and float64, so that it can be made again, bit for bit, on another machine: `residual`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import torch

from monograph.nn.quant_linear import QuantLinear
from monograph.quant.packed_weight import PackedWeight

Factors = tuple[torch.Tensor, torch.Tensor]  # a [rank, cols], b [rows, rank], both float32

_ROWS_AT_ONCE = 32  # a slice of the product stays in the cache over all ranks
_FOREIGN = 0.5  # 4-bit formats are 0.07 to 0.13 from what they were made of, another weight is 1.4


@dataclass(frozen=True)
class Start:
    """How an adapter of one layer began. Errors are squared Frobenius norms."""

    method: str
    against_dense: bool  # W is the dense weight, not what the packed base stands for
    weight: float  # ||W||^2
    before: float  # ||W - base||^2, with the base as it was loaded: the error of a zero start
    after: float  # ||W - (base + s B A)||^2 at the start


def residual(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """weight - scaling b a in float32. Products of float32 are exact in float64 and are summed rank by rank:
    the bits depend on no machine and no number of threads."""
    out = torch.empty_like(weight, dtype=torch.float32)
    wide_a, wide_b = a.double(), b.double()
    for first in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        total = torch.zeros_like(weight[rows], dtype=torch.float64)
        for k in range(a.shape[0]):
            total += wide_b[rows, k : k + 1] * wide_a[k : k + 1]
        out[rows] = (weight[rows].double() - scaling * total).float()
    return out


def dense_weight_of(layer: QuantLinear) -> tuple[torch.Tensor, bool]:
    """(W in float32, whether it is the dense weight)."""
    stands_for = layer.dequantize(torch.float32)
    if layer.dense_source is None:
        return stands_for, False
    weight = layer.dense_source().to(stands_for.device, torch.float32)
    if weight.shape != stands_for.shape:
        raise ValueError(
            f"the dense weight has shape {tuple(weight.shape)}, wanted {tuple(stands_for.shape)}"
        )
    distance = ((weight - stands_for).norm() / weight.norm()).item()
    if not distance <= _FOREIGN:
        raise ValueError(
            f"the dense weight is {distance:.2f} of its norm from the packed one, wanted at most {_FOREIGN}: "
            "it is not what was quantised"
        )
    return weight, True


def singular_factors(weight: torch.Tensor, rank: int, scaling: float, niter: int | None = None) -> Factors:
    """a, b with scaling b a = the best approximation of `weight` of this rank; both carry the square roots of
    the singular values. niter: an approximate method with so many power iterations, at random."""
    if rank > min(weight.shape):
        raise ValueError(f"r is {rank}, wanted at most {min(weight.shape)}, the rank of the weight")
    if niter is None:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        u, s, vh = u[:, :rank], s[:rank], vh[:rank]
    else:
        u, s, v = torch.svd_lowrank(weight, rank, niter=niter)
        vh = v.t()
    root = (s / scaling).sqrt()
    return (root[:, None] * vh).contiguous(), (u * root).contiguous()


def rounded(factors: Factors, dtype: torch.dtype) -> Factors:
    """PEFT casts a new adapter to the base's dtype; the residual must be that of the cast factors."""
    a, b = factors
    return a.to(dtype).float(), b.to(dtype).float()


@torch.no_grad()
def pissa(layer: QuantLinear, rank: int, scaling: float, method: str) -> tuple[Factors, PackedWeight, Start]:
    """Factors, the base that they leave, and how far the start is from W. method: pissa or pissa_niter_N."""
    match = re.fullmatch(r"pissa(?:_niter_(\d+))?", method)
    if match is None:
        raise ValueError(f"init_lora_weights is {method!r}, wanted 'pissa' or 'pissa_niter_N'")
    weight, dense = dense_weight_of(layer)
    niter = None if match[1] is None else int(match[1])
    a, b = rounded(singular_factors(weight, rank, scaling, niter), layer.weight_dtype)
    left = residual(weight, a, b, scaling)
    base = layer.requantize(left)
    return (a, b), base, _start(method, dense, weight, layer, left - base.dequantize(torch.float32))


@torch.no_grad()
def loftq(
    layer: QuantLinear, rank: int, scaling: float, iterations: int
) -> tuple[Factors, Factors | None, PackedWeight, Start]:
    """Factors, the pair that the base was made with (None: the base is the one that was loaded), the base."""
    if iterations < 1:
        raise ValueError(f"loftq_iter is {iterations}, wanted at least 1")
    weight, dense = dense_weight_of(layer)
    if not dense:
        raise ValueError(
            "LoftQ starts from the error of quantisation, and the dense weights are gone: load the 16-bit "
            "folder with MonographConfig, or give it: monograph.add_lora(model, config, dense=FOLDER)"
        )
    base, factors, made_with = layer.packed, None, None
    for _ in range(iterations):
        if factors is not None:
            made_with = factors
            base = layer.requantize(residual(weight, *factors, scaling))
        error = weight - base.dequantize(torch.float32)
        factors = rounded(singular_factors(error, rank, scaling), layer.weight_dtype)
    assert factors is not None
    return factors, made_with, base, _start("loftq", dense, weight, layer, residual(error, *factors, scaling))


def _start(method: str, dense: bool, weight: torch.Tensor, layer: QuantLinear, error: torch.Tensor) -> Start:
    before = weight - layer.dequantize(torch.float32)
    return Start(method, dense, _square(weight), _square(before), _square(error))


def _square(tensor: torch.Tensor) -> float:
    return tensor.double().square().sum().item()


def base_sha256(packed: PackedWeight) -> bytes:
    """The digest of a packed weight's bytes."""
    digest = hashlib.sha256()
    order = () if packed.columns is None else (packed.columns,)
    for tensor in (packed.values, *packed.scales, *order):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).numpy().data)
    return digest.digest()
