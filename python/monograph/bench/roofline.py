"""The bare loops that kernels are measured against. They are a library of their own, loaded here alone."""

from __future__ import annotations

import torch

from monograph.ops.library import library_path

NAME = "monograph_bench_ops.so"


def load() -> None:
    """Registers the operators. A second call, or a library that is loaded already, changes nothing."""
    if hasattr(torch.ops.monograph, "limit_tiles"):
        return
    path = library_path(NAME)
    if not path.exists():
        raise ImportError(f"{path} is missing: benchmarks want a monograph that was built with it")
    torch.ops.load_library(path)


load()


def limit_move(values: torch.Tensor, out: torch.Tensor) -> None:
    """Reads `values` and writes `out` once, without arithmetic."""
    torch.ops.monograph.limit_move(values, out)


def limit_tiles(steps: int) -> float:
    """Floating-point operations of `steps` steps of the bare tile loop; 0 where there is no AMX."""
    return float(torch.ops.monograph.limit_tiles(steps))


def limit_vectors(steps: int) -> float:
    """Floating-point operations of `steps` steps of the bare loop of multiply-adds on vectors."""
    return float(torch.ops.monograph.limit_vectors(steps))
