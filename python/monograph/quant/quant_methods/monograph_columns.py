"""Folders of `monograph convert` whose columns are sorted by group: compressed-tensors' tensors, but `weight`
for `weight_packed`, and `weight_columns` beside each.

compressed-tensors would read such a folder without a word and compute something else, so that it has a
quant_method of its own. transformers only warns of one that it does not know; a `weight` of another shape
is an error there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from monograph.quant.packed_weight import PackedWeight
from monograph.quant.quant_methods.compressed_tensors import CompressedTensors
from monograph.quant.sorted_columns import checked_columns


class MonographColumns(CompressedTensors):
    name = "Monograph"
    methods = ("monograph",)
    saves = ()

    def formats(self, config: Mapping[str, Any]) -> list[str]:
        found = super().formats(config)
        if any(not name.startswith("int") for name in found):
            raise ValueError(f"config_groups has {found}, wanted int of 4 or 8 bits: others have no columns")
        return found

    def pack(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PackedWeight | None:
        columns = tensors.get("weight_columns")
        packed = super().pack(_without_columns(tensors), dtype)
        if packed is None or columns is None:
            if packed is not None or columns is not None:
                wanted = "wanted weight_columns beside each packed weight, and only there"
                raise ValueError(f"found {sorted(tensors)}, {wanted}")
            return None
        return replace(packed, columns=checked_columns(columns, packed.shape[1]))

    def unpack(self, weight: PackedWeight) -> dict[str, torch.Tensor]:
        columns = weight.columns
        if columns is None:
            columns = torch.arange(weight.shape[1], dtype=torch.int32, device=weight.device)
        found = super().unpack(weight.stored)
        return found | {"weight": found.pop("weight_packed"), "weight_columns": columns}

    def check_parts(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().check_parts(config, _without_columns(tensors))


def _without_columns(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As compressed-tensors names them."""
    found = {name: tensor for name, tensor in tensors.items() if name != "weight_columns"}
    if "weight" in found and found["weight"].dtype == torch.int32:
        found["weight_packed"] = found.pop("weight")
    return found
