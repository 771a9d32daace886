"""A device of its own in pages that the host cannot read: who touches its data outside a kernel dies.

Tensors of torch's "privateuseone" device, handed over through DLPack. torch itself can only make empty ones.
"""

import ctypes
import math
import types
from collections.abc import Sequence
from typing import Any

import torch

_PAGE = 4096
_PRIVATE, _ANONYMOUS = 0x02, 0x20  # MAP_PRIVATE, MAP_ANONYMOUS
_NOTHING, _READ, _WRITE = 0, 1, 2  # PROT_*
_DEVICE = 12  # kDLExtDev, which torch takes for privateuseone
_CODES = {
    torch.uint8: (1, 8),
    torch.int64: (0, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_index", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_kept: list[Any] = []  # what tensors point to; they live as long as the process


def _pages(size_bytes: int) -> int:
    return max(1, -(-size_bytes // _PAGE)) * _PAGE


def empty(shape: Sequence[int], dtype: torch.dtype, index: int = 0) -> torch.Tensor:
    code, bits = _CODES[dtype]
    size = _pages(math.prod(shape) * bits // 8)
    data = _libc.mmap(None, size, _NOTHING, _PRIVATE | _ANONYMOUS, -1, 0)
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    managed = _ManagedTensor(data, _DEVICE, index, len(shape), code, bits, 1, sizes)
    _kept.append((managed, sizes))
    return torch.utils.dlpack.from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))


def to_device(host: torch.Tensor, index: int = 0) -> torch.Tensor:
    tensor, size = empty(host.shape, host.dtype, index), host.numel() * host.element_size()
    _libc.mprotect(tensor.data_ptr(), _pages(size), _READ | _WRITE)
    ctypes.memmove(tensor.data_ptr(), host.contiguous().data_ptr(), size)
    _libc.mprotect(tensor.data_ptr(), _pages(size), _NOTHING)
    return tensor


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    host, size = torch.empty(tensor.shape, dtype=tensor.dtype), tensor.numel() * tensor.element_size()
    _libc.mprotect(tensor.data_ptr(), _pages(size), _READ)
    ctypes.memmove(host.data_ptr(), tensor.data_ptr(), size)
    _libc.mprotect(tensor.data_ptr(), _pages(size), _NOTHING)
    return host


def register() -> torch.library.Library:
    """Until the library that it gives goes, torch can make empty tensors of the device."""
    module = types.ModuleType("torch.privateuseone")
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    torch._register_device_module("privateuseone", module)
    library = torch.library.Library("aten", "IMPL")
    library.impl(
        "empty.memory_format",
        lambda size, *, dtype=None, **_: empty(size, dtype or torch.float32),
        "PrivateUse1",
    )
    return library
