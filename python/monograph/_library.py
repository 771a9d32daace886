"""Loads the operator library into this process, once."""

import pathlib

import torch

NAME = "monograph_ops.so"


def library_path() -> pathlib.Path:
    """Where the operator library of this installation lies; an editable one spans two folders."""
    import monograph

    candidates = [pathlib.Path(folder) / NAME for folder in monograph.__path__]
    return next((path for path in candidates if path.exists()), candidates[0])


def load() -> None:
    """Registers the C++ operators. A second call, or an import by a second name, changes nothing."""
    if hasattr(torch.ops.monograph, "system_info"):
        return
    path = library_path()
    if not path.exists():
        raise ImportError(
            f"{path} is missing: this is a source tree that was not built. "
            "Run `pip install --no-build-isolation .` or see README.md, section Build."
        )
    torch.ops.load_library(path)


load()
