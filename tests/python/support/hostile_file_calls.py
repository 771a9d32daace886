"""Valid calls of the operators that work on files: spill files, checkpoints, mapped weights. hostile_calls.py
has the others."""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import pathlib
import tempfile
from random import Random
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def floats(r: Random, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    return torch.randn(shape, generator=generator).to(dtype)


def _spill_folder() -> torch.Tensor:
    return torch.tensor(list(tempfile.gettempdir().encode()), dtype=torch.uint8)


_SPILL_FILES: list[int] = []


def _spill_file() -> int:
    """One for all calls of a process, until a call closes it; the next process removes it."""
    if _SPILL_FILES:
        with contextlib.suppress(RuntimeError):
            torch.ops.monograph.spill_counts(_SPILL_FILES[-1])
            return _SPILL_FILES[-1]
    _SPILL_FILES.append(torch.ops.monograph.spill_open(_spill_folder()))
    return _SPILL_FILES[-1]


def offload(r: Random) -> list[Any]:
    return [floats(r, r.choice((1, 7)), 5, dtype=r.choice(DTYPES)), _spill_file(), r.randrange(3)]


def reload(r: Random) -> list[Any]:
    x = floats(r, 3, 5)
    return [torch.ops.monograph.offload(x, _spill_file(), 0), x]


def wait(r: Random) -> list[Any]:
    x = floats(r, 3, 5, dtype=r.choice(DTYPES))
    return [torch.ops.monograph.offload(x, _spill_file(), 0), x, [3, 5], x.dtype]


def spill_open(r: Random) -> list[Any]:
    # Files that earlier calls opened are closed: there is a limit to them.
    newest = torch.ops.monograph.spill_open(_spill_folder())
    for number in {*range(max(newest - 9, 1), newest + 1)} - {_spill_file()}:
        with contextlib.suppress(RuntimeError):
            torch.ops.monograph.spill_close(number)
    return [_spill_folder()]


def spill_close(r: Random) -> list[Any]:
    return [torch.ops.monograph.spill_open(_spill_folder())]


def spill_same(r: Random) -> list[Any]:
    x = floats(r, 3, 5)
    return [torch.ops.monograph.offload(x, _spill_file(), 0), x]


def spill_counts(r: Random) -> list[Any]:
    return [_spill_file()]


@functools.cache
def _checkpoint_folder() -> str:
    folder = tempfile.mkdtemp()
    header = json.dumps({"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    content = len(header).to_bytes(8, "little") + header + b"ab"
    pathlib.Path(folder, "model.safetensors").write_bytes(content)
    return folder


def checkpoint_sha256(r: Random) -> list[Any]:
    return [torch.tensor(list(_checkpoint_folder().encode()), dtype=torch.uint8)]


@functools.cache
def _gguf_file() -> str:
    from support.gguf_by_package import tiny, write_by_package

    name = str(pathlib.Path(tempfile.mkdtemp(), "it.gguf"))
    write_by_package(tiny("Qwen2"), name, "qwen2")
    return name


def read_gguf(r: Random) -> list[Any]:
    return [torch.tensor(list(_gguf_file().encode()), dtype=torch.uint8)]


@functools.cache
def _mapped_file() -> tuple[Any, mmap.mmap, int]:
    """64 KiB of a file: the file, its mapping, the address."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(bytes(1 << 16))
    file.flush()
    area = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return file, area, torch.frombuffer(area, dtype=torch.uint8).data_ptr()


_opened = [0]  # calls of read_ahead_open: none of its numbers is larger


def read_ahead_open(r: Random) -> list[Any]:
    for number in range(1, _opened[0] + 1):
        torch.ops.monograph.read_ahead_close(number)
    _opened[0] += 1
    file, _, address = _mapped_file()
    tensors = [address, 1 << 15, 0, 0, 0, r.randrange(3), address + (1 << 15), 1 << 14, 1, 0, 1 << 15, 0]
    return [tensors, [file.fileno()], 1 << 26]


def read_ahead_close(r: Random) -> list[Any]:
    return [r.randrange(-1, _opened[0] + 2)]


def read_ahead_numbers(r: Random) -> list[Any]:
    return [torch.ops.monograph.read_ahead_open(*read_ahead_open(r))]


def read_ahead_events(r: Random) -> list[Any]:
    return read_ahead_numbers(r)
