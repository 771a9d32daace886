"""monograph::checkpoint_sha256: the hash of a folder's tensors, as `monograph inspect --hash` prints it.

Of the files that a model has, in whatever shards: model.safetensors or those of its index, and no other file
beside them. core/monograph/hash/checkpoint_hash.h says what is hashed.
"""

from __future__ import annotations

import os

import torch

from monograph.ops import library  # noqa: F401  (the schema is registered there)


def checkpoint_sha256(folder: str | os.PathLike[str]) -> str:
    """64 hexadecimal digits. Raises RuntimeError, naming the file and the rule, if it is no checkpoint."""
    name = torch.frombuffer(bytearray(os.fsencode(os.path.abspath(folder))), dtype=torch.uint8)
    return bytes(torch.ops.monograph.checkpoint_sha256(name)).hex()
