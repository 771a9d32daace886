"""Which operators have kernels for a device; on the others a provider of ops/providers.py computes."""

from __future__ import annotations

import torch

from monograph.upstream.torch_names import has_kernel_for

_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "meta": "Meta"}


def dispatch_key(device_type: str) -> str:
    return _KEYS.get(device_type, "PrivateUse1")


def has_kernel(operator: str, device: torch.device) -> bool:
    """Whether monograph::operator has a kernel for the device, of ours or of a library that was loaded."""
    return bool(has_kernel_for(f"monograph::{operator}", dispatch_key(device.type)))


def has_portable(operator: str) -> bool:
    """Whether monograph::operator has an implementation in aten operations."""
    return bool(has_kernel_for(f"monograph::{operator}", "CompositeExplicitAutograd"))
