"""Which operators have kernels for a device; on the others the portable implementations run."""

from __future__ import annotations

import torch

from monograph.integrations.torch.private_names import has_kernel_for

_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "meta": "Meta"}


def has_kernel(operator: str, device: torch.device) -> bool:
    """Whether monograph::operator has a kernel for the device, of ours or of a library that was loaded."""
    key = _KEYS.get(device.type, "PrivateUse1")
    return bool(has_kernel_for(f"monograph::{operator}", key))
