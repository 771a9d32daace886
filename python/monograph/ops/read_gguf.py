"""monograph::read_gguf: what a GGUF file says of its model, in transformers' words.

core/monograph/gguf/description.h lists what there is; the same code writes the folder of
`monograph dequantize`.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from monograph.ops import library  # noqa: F401  (the schema is registered there)


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a file in GGUF, by its ending or its first bytes."""
    if not os.path.isfile(path):
        return False
    if os.fspath(path).endswith(".gguf"):
        return True
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def read_gguf(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings, tokenizer and the place of each tensor. Raises ValueError, naming the file and what is not
    understood."""
    name = torch.frombuffer(bytearray(os.fsencode(os.path.abspath(path))), dtype=torch.uint8)
    try:
        text = torch.ops.monograph.read_gguf(name)
    except RuntimeError as error:
        raise ValueError(str(error).partition("\n")[0].removeprefix("read_gguf: ")) from None
    return json.loads(text.numpy().tobytes())
