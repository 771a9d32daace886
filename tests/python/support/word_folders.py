"""Model folders in the words of GPTQ, AutoRound and AWQ, packed here field by field from random codes."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from support.producer_folders import DENSE, tensors, write_folder

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the output that nibble i of a word holds


@dataclass
class Words:
    method: str = "gptq"
    bits: int = 4
    group: int = 64  # -1: a row
    symmetric: bool = False
    act_order: bool = False  # g_idx scatters groups over the inputs, by their number alone: q, k, v have one
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def along_outputs(self) -> bool:
        return self.method == "awq" or "awq" in self.settings.get("packing_format", "")

    @property
    def less(self) -> int:
        """What GPTQ's first version subtracts from a zero point."""
        if self.along_outputs or "gptq_v2" in self.settings.values():
            return 0
        return 0 if self.settings.get("packing_format") == "auto_round" else 1


def _pack(fields: np.ndarray, bits: int) -> torch.Tensor:
    """Along the first axis, the first field in the lowest bits of a word."""
    per_word = 32 // bits
    rows = fields.astype(np.uint32).reshape(-1, per_word, *fields.shape[1:])
    words = np.zeros((rows.shape[0], *fields.shape[1:]), np.uint32)
    for i in range(per_word):
        words |= rows[:, i] << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32).copy())


def _pack_awq(fields: np.ndarray) -> torch.Tensor:
    """Along the second axis, in AWQ's order."""
    eights = fields.reshape(fields.shape[0], -1, 8)[:, :, AWQ_ORDER]
    return _pack(eights.reshape(fields.shape[0], -1).T, 4).T.contiguous()


def _fields(words: torch.Tensor, bits: int) -> np.ndarray:
    """What `_pack` packed."""
    found = words.numpy().view(np.uint32)
    parts = [found >> np.uint32(at) & np.uint32((1 << bits) - 1) for at in range(0, 32, bits)]
    return np.stack(parts, axis=1).reshape(-1, *found.shape[1:])


def sorted_rows(parts: dict[str, torch.Tensor], words: Words) -> dict[str, torch.Tensor]:
    """One GPTQ weight in rows with its inputs sorted by group: what `convert` writes."""
    codes = _fields(parts["qweight"], words.bits)
    columns = np.argsort(parts["g_idx"].numpy(), kind="stable")
    shape = torch.tensor([codes.shape[1], codes.shape[0]])
    rows = {"weight": _pack(codes[columns], words.bits).T.contiguous(), "weight_shape": shape}
    rows |= {"weight_scale": parts["scales"].T.contiguous()}
    rows |= {"weight_columns": torch.from_numpy(columns.astype(np.int32))}
    if not words.symmetric:
        zeros = _fields(parts["qzeros"].T.contiguous(), words.bits) + words.less
        rows["weight_zero_point"] = _pack(zeros, words.bits)
    return rows


def word_weight(
    words: Words, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of one weight, and its values in fp32."""
    outputs, inputs = shape
    group = inputs if words.group == -1 else words.group
    full, middle = 1 << words.bits, 1 << (words.bits - 1)
    codes = rng.integers(0, full, (inputs, outputs))
    # From 1 on: 0 has two readings in GPTQ's first version.
    zeros = rng.integers(1, full, (inputs // group, outputs))
    if words.symmetric:
        zeros[:] = middle
    scales = (rng.random((inputs // group, outputs)) * 0.02 + 0.001).astype(np.float16)
    index = np.arange(inputs) // group
    if words.act_order:
        index = np.random.default_rng(inputs).permutation(index)
    dense = (codes - zeros[index]).astype(np.float32) * scales[index].astype(np.float32)
    parts = {"scales": torch.from_numpy(scales)}
    if words.along_outputs:
        parts |= {"qweight": _pack_awq(codes), "qzeros": _pack_awq(zeros)}
    else:
        parts["qweight"] = _pack(codes, words.bits)
        parts["qzeros"] = _pack((zeros - words.less).T, words.bits).T.contiguous()
        parts["g_idx"] = torch.from_numpy(index.astype(np.int32))
    return parts, torch.from_numpy(dense.T.copy())


def write_words(source: pathlib.Path, folder: pathlib.Path, words: Words) -> dict[str, torch.Tensor]:
    """Gives the decoded weights in fp32: {layer: [outputs, inputs]}."""
    rng = np.random.default_rng(0)
    state, dense = tensors(source), {}
    for name in [name for name in state if name.endswith("_proj.weight")]:
        layer = name.removesuffix(".weight")
        if layer in DENSE:
            continue
        parts, dense[layer] = word_weight(words, state.pop(name).shape, rng)
        state |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
    state = {name: t.to(torch.float16) if t.is_floating_point() else t for name, t in state.items()}
    settings = {"quant_method": words.method, "bits": words.bits, "group_size": words.group}
    write_folder(source, folder, state, settings | {"sym": words.symmetric} | words.settings)
    return dense
