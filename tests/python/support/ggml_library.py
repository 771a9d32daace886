"""ggml's C inside PyPI's xllamacpp: its quantisers and dequantisers."""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
from typing import Any

import numpy as np


def ggml() -> Any:
    """The library, or None where xllamacpp is not installed."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or not spec.submodule_search_locations:
        return None
    (path,) = pathlib.Path(spec.submodule_search_locations[0]).glob("*.so")
    library = ctypes.CDLL(str(path))
    sizes = [ctypes.c_int64] * 3
    pointers = [ctypes.c_void_p] * 2
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, *pointers, *sizes, ctypes.c_void_p]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def decoded(library: Any, kind: str, blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What dequantize_row_* makes of the blocks; `kind` as gguf says it, "Q4_K"."""
    values = np.empty(shape, np.float32)
    decode = getattr(library, f"dequantize_row_{kind.replace('Q', 'q')}")
    decode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    data = np.ascontiguousarray(blocks)
    decode(data.ctypes.data, values.ctypes.data, values.size)
    return values
