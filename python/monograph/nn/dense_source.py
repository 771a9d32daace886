"""Where the dense weights of a packed model can still be read: a folder of safetensors, or a dense model."""

from __future__ import annotations

import json
import os
from functools import partial

import torch
from torch import nn

from monograph.nn.quant_linear import QuantLinear

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def remember_dense(model: nn.Module, source: str | os.PathLike[str] | nn.Module | None) -> None:
    """Lets every QuantLinear of `model` read the weight it was made of; None forgets. Nothing is read yet."""
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantLinear):
            continue
        if source is None:
            layer.dense_source = None
        elif isinstance(source, nn.Module):
            layer.dense_source = partial(_weight_of, source, name)
        else:
            layer.dense_source = partial(read_tensor, os.fspath(source), f"{name}.weight")


def _weight_of(model: nn.Module, name: str) -> torch.Tensor:
    layer = model.get_submodule(name)
    if type(layer) is not nn.Linear:
        raise ValueError(f"dense model: {name} is a {type(layer).__name__}, wanted nn.Linear")
    return layer.weight.detach()


def local_folder(folder: str) -> str:
    """The folder itself, or that of a name in the Hugging Face cache."""
    if os.path.isdir(folder):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"dense weights: {folder} is no folder and not in the Hugging Face cache; give the folder: "
            "monograph.add_lora(model, config, dense=FOLDER)"
        ) from error


def read_tensor(folder: str, key: str) -> torch.Tensor:
    """One tensor of a checkpoint on this machine; `folder` may be a name in the Hugging Face cache."""
    from safetensors import safe_open

    folder = local_folder(folder)
    file = _SINGLE
    if os.path.isfile(os.path.join(folder, _INDEX)):
        with open(os.path.join(folder, _INDEX), encoding="utf-8") as index:
            file = json.load(index)["weight_map"].get(key)
    path = os.path.join(folder, file or _SINGLE)
    if file is None or not os.path.isfile(path):
        raise ValueError(f"{folder}: no dense weight {key}, wanted it in {_SINGLE} or {_INDEX}")
    with safe_open(path, framework="pt") as tensors:
        if key not in tensors.keys():  # noqa: SIM118  (no mapping)
            raise ValueError(f"{path}: no tensor {key}; the dense weights must have the names of the modules")
        return tensors.get_tensor(key)
