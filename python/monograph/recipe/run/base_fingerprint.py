"""monograph.json beside an adapter: the base it was trained on, by the hash of `monograph inspect --hash`."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from monograph.recipe.config.model_folder import stored_path

NAME = "monograph.json"


def _hash_of(folder: str) -> str:
    """Of a folder, or of a GGUF file."""
    from monograph.ops.checkpoint_sha256 import checkpoint_sha256

    try:
        return checkpoint_sha256(folder)
    except RuntimeError as error:
        raise ValueError(f"base_model: {error}") from None


def _sha256(weight: Any) -> str:
    """Of the values of a packed weight, or layer, and of the order of its columns if they have one."""
    import torch

    found = hashlib.sha256()
    for tensor in (weight.values, weight.columns):
        if tensor is not None:
            found.update(tensor.detach().contiguous().view(torch.uint8).flatten().cpu().numpy().data)
    return found.hexdigest()


def _of_all(digests: dict[str, str]) -> str:
    """Of the digests of weights by name."""
    ordered = sorted(digests.items(), key=lambda item: item[0].encode())
    lines = [f"{json.dumps(name, ensure_ascii=False)} {digest}\n" for name, digest in ordered]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _layer_of(path: str) -> str:
    """`model.layers.0` of whatever is in it: files name what is between a layer and its experts otherwise."""
    found = re.match(r"(?:base_model\.model\.)?(.+?\.\d+)\.", path)
    return found[1] if found else ""


def _parts(model: Any) -> Iterator[tuple[str, Any]]:
    """The modules of a model by path; of one that is sharded each unit while it is whole."""
    from monograph.distributed.unshard import whole_units
    from monograph.distributed.unsharded_unit import stored_units

    units = tuple(f"{path}." for path in stored_units(model))
    yield from (part for part in model.named_modules() if not f"{part[0]}.".startswith(units))
    for path, unit in whole_units(model):
        yield from ((f"{path}.{name}" if name else path, module) for name, module in unit.named_modules())


def _kind_of(layer: Any, layers: list[Any]) -> tuple[str, int, bool, str]:
    """(format as the native tool calls it, block, double_quant, rule); where rows are blocks, block is 0."""
    from monograph.ops.formats import GROUP_FORMATS

    name, block = layer.format.name, layer.block_size
    if name in GROUP_FORMATS:
        name = name.split("-")[0]
        if all(one.block_size == one.in_features for one in layers):
            block = 0
    return "nvfp4" if name == "nvfp4-divide" else name, block, layer.double_quant, layer.rule


def is_in_parts(model: Any) -> bool:
    """Whether ranks have parts of the base, and read it together."""
    from monograph.distributed.expert_parallel import expert_group_of
    from monograph.distributed.shard import shard_group_of

    return shard_group_of(model) is not None or expert_group_of(model) is not None


def _sha256_of_stack(layer: Any, name: str) -> str:
    """Of a stack whose experts may be spread over ranks: all of them call it, the first one has the hash."""
    from monograph.distributed.expert_values import values_in_order

    if layer.expert_share is None:
        return _sha256(layer.packed(name))
    found = hashlib.sha256()
    for part in values_in_order(layer, name):
        found.update(part.cpu().numpy().data)
    return found.hexdigest()


def packing_of(model: Any) -> dict[str, Any] | None:
    """How the base is packed, for core/monograph/adapter/adapter.h; None if layers differ or none is. All
    ranks that have parts of a base call it."""
    from monograph.nn import PackedExperts, QuantLinear
    from monograph.ops.formats import GGML_FORMATS

    packed = [layer for layer in model.modules() if isinstance(layer, QuantLinear)]
    if any(layer.format.name in GGML_FORMATS for layer in packed):
        return None  # no folder holds the same values
    kinds = {_kind_of(layer, packed) for layer in packed}
    if len(kinds) != 1:
        return None
    layers: dict[str, str] = {}
    stacks: dict[str, str] = {}
    for path, layer in _parts(model):
        if isinstance(layer, QuantLinear):
            name = path.removeprefix("base_model.model.").removesuffix(".base_layer")
            layers[f"{name}.weight"] = _sha256(layer)
        elif isinstance(layer, PackedExperts):
            stacks |= {f"{_layer_of(path)}.{name}": _sha256_of_stack(layer, name) for name in layer.stacks}
    name, block, double_quant, rule = kinds.pop()
    record = {
        "format": name,
        "block": block,
        "double_quant": double_quant,
        "rule": rule,
        "values_sha256": _of_all(layers),
    }
    if not stacks:
        return record
    return record | {"experts": True, "experts_sha256": _of_all(stacks)}


def make_base_fingerprint(
    folder: str, output_dir: str, *, quantised: bool, packed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What monograph.json says of a base. Files that have not changed since output_dir got one are not read
    again."""
    weights = "dequantized" if quantised else "original"
    base = {
        "sha256": base_sha256(folder, read_base_fingerprint(output_dir)),
        "weights": weights,
        **_files_of(stored_path(folder)),
    }
    return {"schema_version": 1, "base": base | ({} if packed is None else {"packed": packed})}


def base_sha256(folder: str, known: Mapping[str, Any]) -> str:
    """The hash of a base; that of a record if it is of these files, unchanged."""
    folder = stored_path(folder)
    seen = _files_of(folder)
    before = known.get("base", {})
    same = bool(seen["files"]) and all(before.get(name) == value for name, value in seen.items())
    return before["sha256"] if same else _sha256_of_files(folder, json.dumps(seen))


# The name of the hash below in what defines a run.
CONFIG_OF_BASE = "config.json of base_model"


def config_sha256(folder: str) -> dict[str, str]:
    """Of a base's config.json, which forward follows as much as the tensors; of a GGUF file's settings, where
    that lies left out. Empty for a folder without one."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        return {}
    with open(path, "rb") as file:
        found = file.read()
    if stored_path(folder) != folder:
        config = json.loads(found)
        del config["quantization_config"]["file"]
        found = json.dumps(config, sort_keys=True).encode()
    return {CONFIG_OF_BASE: hashlib.sha256(found).hexdigest()}


@functools.lru_cache(maxsize=8)
def _sha256_of_files(folder: str, seen: str) -> str:
    """Once a process, as long as the files are those that were seen."""
    return _hash_of(folder)


def _files_of(folder: str) -> dict[str, Any]:
    """Of a folder, or of a GGUF file."""
    place, names = folder, [os.path.basename(folder)]
    if os.path.isdir(folder):
        names = [name for name in sorted(os.listdir(folder)) if name.endswith(".safetensors")]
    else:
        place = os.path.dirname(folder)
    files = {}
    for name in names:
        status = os.stat(os.path.join(place, name))
        files[name] = {"size": status.st_size, "modified_ns": status.st_mtime_ns}
    return {"folder": os.path.abspath(folder), "files": files}


def read_base_fingerprint(adapter: str) -> dict[str, Any]:
    """monograph.json of a folder; empty if it has none."""
    path = os.path.join(adapter, NAME)
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def write_base_fingerprint(record: Mapping[str, Any], folder: str) -> None:
    """Writes monograph.json, in place of another."""
    path = os.path.join(folder, NAME)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
    os.replace(f"{path}.new", path)
