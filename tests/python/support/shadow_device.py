"""A second device, "shadow", whose tensors hold host memory that only operators may touch.

It finds what an accelerator would find: tensors left on the host, and reads of the device's data by the host
(`syncs` counts them). Our operators have no kernels there, so the portable implementations run; aten's run on
the host tensor behind. Eager mode and autograd only. `install()` changes torch for the whole process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from monograph.upstream.torch_names import process_group_named

NAME = "shadow"
_TORCH = os.sep + "torch" + os.sep
_HOST_READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero")
_PORTABLE = torch._C.DispatchKey.CompositeExplicitAutograd

# Names of groups that carry this device's tensors and no others, as NCCL's do, to those behind them.
groups: dict[str, str] = {}
syncs: list[tuple[str, str]] = []  # what made the host wait for the device, and the file it was called in


def _waits(name: str) -> None:
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        _TORCH in frame.f_code.co_filename or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    syncs.append((name, frame.f_code.co_filename))


class ShadowTensor(torch.Tensor):
    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> ShadowTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(f"{NAME}:0"),
            requires_grad=False,
        )
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def tolist(self) -> Any:
        _waits("tolist")
        return self.host.tolist()

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter  # type: ignore[override]
    def data(self, value: ShadowTensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.host = value.host

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShadowTensor({self.host})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name
    if name.startswith("monograph::"):
        with ShadowMode():  # torch has left it to call this
            return func._op_dk(_PORTABLE, *args, **kwargs)
    if name.startswith(("c10d::", "_c10d_functional::")):
        return _collective(func, args, kwargs)
    if name in _HOST_READS:
        _waits(name)
    tensors: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
    if name == "aten::to" and not any(isinstance(t, ShadowTensor) for t in tensors):
        return ShadowTensor(func(*args, **{**kwargs, "device": "cpu"}).clone())
    moves = name in ("aten::_to_copy", "aten::copy_") or name.endswith("_like")
    for t in tensors:
        if not moves and not isinstance(t, ShadowTensor) and t.dim() > 0 and t.numel() > 0:
            raise RuntimeError(f"{name}: a tensor {list(t.shape)} is on {t.device}, others are on {NAME}")
    wanted = kwargs.get("device")
    here = torch.device(wanted).type == NAME if wanted is not None else bool(tensors)
    if name == "aten::copy_":
        here = isinstance(args[0], ShadowTensor)
        if not here and isinstance(args[1], ShadowTensor):
            _waits("copy to the host")
    elif name == "aten::_to_copy" and not here:
        _waits("copy to the host")
    host_args = tree_map_only(ShadowTensor, lambda t: t.host, args)
    host_kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
    host_kwargs = tree_map_only(ShadowTensor, lambda t: t.host, host_kwargs)
    out = func(*host_args, **host_kwargs)
    if not here or name in _HOST_READS[:3]:
        return out
    out = tree_map(lambda t: ShadowTensor(t) if type(t) is torch.Tensor else t, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


def _collective(func: Any, args: Any, kwargs: Any) -> Any:
    """Over the group behind, with the host tensors behind: all of them must be of the device."""

    def behind(value: Any) -> Any:
        if isinstance(value, str):
            return groups.get(value, value)
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            name = groups.get(dist.ProcessGroup.unbox(value).group_name)
            return value if name is None else process_group_named(name).boxed()
        if isinstance(value, torch.Tensor) and not isinstance(value, ShadowTensor):
            raise RuntimeError(f"{func}: a tensor {list(value.shape)} is on {value.device}, wanted {NAME}")
        return value.host if isinstance(value, ShadowTensor) else value

    out = func(*tree_map(behind, args), **tree_map(behind, kwargs))
    if func._schema.is_mutable and isinstance(out, torch.Tensor):  # what it wrote to
        return kwargs["out"] if "out" in kwargs else args[0]
    return tree_map(lambda t: ShadowTensor(t) if type(t) is torch.Tensor else t, out)


def stand_in_group(ranks: list[int]) -> Any:
    """A group of gloo for this device alone: torch refuses tensors of the host there, in NCCL's words."""
    behind, made = dist.new_group(ranks), dist.new_group(ranks, backend=f"{NAME}:gloo")
    groups[made.group_name] = behind.group_name
    return made


class ShadowMode(TorchDispatchMode):
    """Makes tensors of the device, and of tensors of the host ones there."""

    def __enter__(self) -> ShadowMode:
        self.before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) makes one here, and moves it
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self.before)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type == NAME:
            return run(func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def shadow() -> Iterator[list[tuple[str, str]]]:
    """Inside, `device="shadow"` works; gives the list of the host's reads, emptied."""
    syncs.clear()
    with ShadowMode():
        yield syncs


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_rest = torch.library.Library("_", "IMPL")
_makers = torch.library.Library("aten", "IMPL")  # where torch has left the mode


def _empty(size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> ShadowTensor:
    return ShadowTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: torch.dtype | None = None, **_: Any) -> ShadowTensor:
    return ShadowTensor(torch.empty_strided(size, stride, dtype=dtype))


def install() -> None:
    _setup_privateuseone_for_python_backend(NAME, _Module())
    _makers.impl("empty.memory_format", _empty, "PrivateUse1")
    _makers.impl("empty_strided", _empty_strided, "PrivateUse1")
    _rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
