"""monograph::offload, reload and wait: a tensor leaves memory and comes back, as nodes of a graph.

    handle = offload(x, file, slot)          # x may be freed now
    begun = reload(handle, after)            # the bytes are on their way
    y = wait(begun, after, shape, dtype)     # contiguous; its bits are those of x

On the CPU x goes to a spill file and the handle is int64 [2]; what it stands for lives as long as the handle.
Of another device x goes to (pinned) host memory (`device_copies.py`). `file` 0 is the spill file
that was opened last. `slot` is not read: two offloads of one tensor with two slots are two nodes for
everybody who merges equal ones. `after` is a tensor of the backward pass, so that nothing is fetched before
it, and names the device to come back to. The output of none of them shares memory with an input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monograph.ops import library  # noqa: F401  (the schema is registered there)
from monograph.ops.argument_checks import require
from monograph.ops.autograd import register_not_differentiable


def offload(x: torch.Tensor, file: int = 0, slot: int = 0) -> torch.Tensor:
    """A handle of the bytes of `x`."""
    return torch.ops.monograph.offload(x.detach().contiguous(), file, slot)


def reload(handle: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """A handle of bytes that are being fetched."""
    return torch.ops.monograph.reload(handle, after)


def wait(handle: torch.Tensor, after: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor, on the device of `after`."""
    return torch.ops.monograph.wait(handle, after, shape, dtype)


def _strided(op: str, what: str, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        raise ValueError(f"{op}: {what} is None, wanted a tensor")
    require(tensor.layout is torch.strided, op, f"{what} is {tensor.layout}, wanted an ordinary tensor")


def _handle(op: str, handle: torch.Tensor) -> None:
    _strided(op, "handle", handle)
    require(handle.device.type == "cpu", op, f"handle is on {handle.device}, wanted cpu: one of offload")


@torch.library.register_fake("monograph::offload")
def _(x, file, slot):  # type: ignore[no-untyped-def]
    _strided("offload", "x", x)
    if x.device.type == "cpu":
        return x.new_empty([2], dtype=torch.int64)
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


@torch.library.register_fake("monograph::reload")
def _(handle, after):  # type: ignore[no-untyped-def]
    _handle("reload", handle)
    _strided("reload", "after", after)
    return torch.empty([2], dtype=torch.int64, device="cpu")


@torch.library.register_fake("monograph::wait")
def _(handle, after, shape, dtype):  # type: ignore[no-untyped-def]
    _handle("wait", handle)
    _strided("wait", "after", after)
    return after.new_empty(shape, dtype=dtype)


register_not_differentiable("wait")
