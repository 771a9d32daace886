"""Which operators have kernels for a device; on the others the portable implementations run."""

from __future__ import annotations

import torch

from monograph.upstream.torch_names import has_kernel_for

_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "meta": "Meta"}


def _computed_there(operators: tuple[str, ...], device_type: str) -> bool:
    return all(has_kernel(operator, torch.device(device_type)) for operator in operators)


def install() -> None:
    """Called when torch._dynamo is imported, which takes longer than all of ours: a graph decides once what
    has a kernel, as kernels are registered when libraries are loaded."""
    torch.compiler.assume_constant_result(_computed_there)


def may_take_over(device_type: str, *operators: str) -> bool:
    """Whether our operators may stand in the place of another library's code on such a device: all have
    kernels for it. Where they have none, their portable form would replace what that library chose for the
    device. On meta nothing is computed, and a model there is one that will lie elsewhere."""
    return device_type in ("cpu", "meta") or bool(_computed_there(operators, device_type))


def has_kernel(operator: str, device: torch.device) -> bool:
    """Whether monograph::operator has a kernel for the device, of ours or of a library that was loaded."""
    key = _KEYS.get(device.type, "PrivateUse1")
    return bool(has_kernel_for(f"monograph::{operator}", key))
