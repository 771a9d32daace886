"""Loads the operator library into this process, once; beside it that of CUDA, where torch has CUDA."""

import ctypes
import pathlib
import sys
import warnings

import torch

NAME = "monograph_ops.so"
CUDA_NAME = "monograph_cuda.so"
CUDA_TORCH = (2, 13)
# As cuDriverGetVersion gives it: the run time that is linked in wants a driver of its own age.
CUDA_DRIVER = 13000


def library_path(name: str = NAME) -> pathlib.Path:
    """Where a library of this installation lies; an editable one spans two folders."""
    # Asked by name: the package is above this module, and loaded before it.
    candidates = [pathlib.Path(folder) / name for folder in sys.modules["monograph"].__path__]
    return next((path for path in candidates if path.exists()), candidates[0])


def load() -> None:
    """Registers the C++ operators. A second call, or an import by a second name, changes nothing."""
    if hasattr(torch.ops.monograph, "system_info"):
        return
    path = library_path()
    if not path.exists():
        raise ImportError(
            f"{path} is missing: this is a source tree that was not built. "
            "Run `pip install --no-build-isolation .` (README.md, section Install)."
        )
    torch.ops.load_library(path)


def driver_version() -> int:
    """Of CUDA, 13000 for 13.0; 0 without a driver. Starts nothing: a process may still fork."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int(0)
    return 0 if driver.cuDriverGetVersion(ctypes.byref(version)) else version.value


def why_no_cuda() -> str | None:
    """Registers the kernels of CUDA; or says why the portable implementations stay. A second call is free."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    path = library_path(CUDA_NAME)
    if not path.exists():
        return f"{CUDA_NAME} is not part of this installation"
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < CUDA_TORCH:
        return f"torch is {torch.__version__}, {CUDA_NAME} wants {'.'.join(map(str, CUDA_TORCH))} or later"
    if 0 < (found := driver_version()) < CUDA_DRIVER:
        older, wanted = (f"{number // 1000}.{number % 1000 // 10}" for number in (found, CUDA_DRIVER))
        return f"the driver is that of CUDA {older}, {CUDA_NAME} wants {wanted} or later"
    try:
        torch.ops.load_library(path)  # twice is once
    except (OSError, RuntimeError) as error:
        return f"{CUDA_NAME} does not load: {error}"
    return None


load()
if library_path(CUDA_NAME).exists() and torch.version.cuda is not None and (_reason := why_no_cuda()):
    warnings.warn(f"monograph: on CUDA the portable implementations run: {_reason}", stacklevel=2)
