"""A GGUF file as a model of transformers: its settings as a folder, its tensors as views of the mapped file.

folder = gguf_folder("llama-Q4_K_M.gguf")      # config.json, tokenizer.json ...: what AutoTokenizer reads
state = gguf_state("llama-Q4_K_M.gguf")        # the keys that quant_methods/gguf.py packs
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import tempfile
import warnings
from typing import Any

import torch

from monograph.nn.packed_embedding import PackedEmbedding
from monograph.nn.packed_experts import DOWN
from monograph.nn.quant_linear import QuantLinear
from monograph.ops.formats import GGML_FORMATS, ggml_format
from monograph.ops.read_gguf import read_gguf
from monograph.quant.ggml_weight import rotary_row_map
from monograph.quant.quant_methods.gguf import PAIR, ROWS

_FILES = {
    "config": "config.json",
    "tokenizer": "tokenizer.json",
    "tokenizer_config": "tokenizer_config.json",
    "generation_config": "generation_config.json",
}
# PEFT looks for a config.json below the name of the base, to see whether the vocabulary grew.
warnings.filterwarnings("ignore", r"Could not find a config file in .*\.gguf - will assume")
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
_PARTS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ROUTERS = (".mlp.gate.weight", ".mlp.router.weight")
# Plain floats that are no weights of modules.
_PARAMETERS = (*(f".experts.{name}{end}" for name in (PAIR, DOWN) for end in ("", "_bias")), ".sinks")
_DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def gguf_folder(path: str | os.PathLike[str]) -> str:
    """What stands beside the weights, in a folder that lasts as long as the process; the same for a file that
    has not changed."""
    path = os.path.abspath(os.path.expanduser(path))
    status = os.stat(path)
    return _folder_of(path, status.st_size, status.st_mtime_ns)


def gguf_of(folder: str | os.PathLike[str]) -> str | None:
    """The file that a folder of `gguf_folder` was made of; None for any other."""
    try:
        with open(os.path.join(folder, _FILES["config"]), encoding="utf-8") as file:
            stored = json.load(file).get("quantization_config") or {}
    except (OSError, ValueError, AttributeError):
        return None
    return stored.get("file") if stored.get("quant_method") == "gguf" else None


@functools.lru_cache(maxsize=8)
def _described(path: str, size: int, modified: int) -> dict[str, Any]:
    return read_gguf(path)


@functools.lru_cache(maxsize=8)
def _folder_of(path: str, size: int, modified: int) -> str:
    said = _described(path, size, modified)
    if "no_tokenizer" in said:
        raise ValueError(f"{said['no_tokenizer']}; monograph dequantize makes a folder that may take another")
    folder = tempfile.mkdtemp(prefix="monograph-gguf-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for key, name in _FILES.items():
        if key not in said:
            continue
        value = said[key]
        if key == "config":
            packed = any(tensor["type"] not in _DENSE for tensor in said["tensors"])
            stored = {"quant_method": "gguf", "file": path, "packed": packed}
            value = value | {"quantization_config": stored}
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=False)
    return folder


def _config_of(path: str) -> dict[str, Any]:
    status = os.stat(path)
    config: dict[str, Any] = _described(path, status.st_size, status.st_mtime_ns)["config"]
    return config


def gguf_tensors(path: str) -> list[dict[str, Any]]:
    """name, type, shape, offset and bytes of each tensor, as `monograph.ops.read_gguf` gives them."""
    status = os.stat(path)
    return _described(path, status.st_size, status.st_mtime_ns)["tensors"]


def gguf_state(path: str) -> dict[str, torch.Tensor]:
    """A state dict of views of the file: no page of it is read. Plain floats whose rows have another order,
    and norms that are stored with a one added, are new tensors."""
    tensors, kind = gguf_tensors(path), _config_of(path)["model_type"]
    alternate = kind == "gpt_oss"
    if kind == "mixtral":
        tensors = [tensor | {"name": _of_mixtral(tensor["name"])} for tensor in tensors]
    mapped = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)
    state: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[dict[str, Any]]] = {}
    for tensor in tensors:
        if found := _EXPERT.fullmatch(tensor["name"]):
            stacks.setdefault(f"{found[1]}.{found[2]}.{found[3]}", []).append(tensor)
        else:
            at = tensor["offset"]
            _add(state, tensor, mapped[at : at + tensor["bytes"]], path)
    for layer in dict.fromkeys(name.rsplit(".", 2)[0] for name in stacks):
        weights = {part: _stack(mapped, stacks[f"{layer}.{part}.weight"]) for part in _PARTS}
        _add_experts(state, layer, weights, path, alternate)
        if f"{layer}.{DOWN}.bias" in stacks:
            biases = [stacks[f"{layer}.{part}.bias"] for part in _PARTS]
            for part, experts in zip(_PARTS, biases, strict=True):
                if _kind_of(experts[0]) not in _DENSE:
                    wanted = f"is {_kind_of(experts[0])}, wanted f32, f16, bf16"
                    raise ValueError(f"{path}: {layer}.*.{part}.bias {wanted}")
            gate, up, down = (_stack(mapped, experts)[1] for experts in biases)
            state[f"{layer}.{PAIR}_bias"] = _joined(gate, up, alternate)
            state[f"{layer}.{DOWN}_bias"] = down
    packed = next((key for key in state if key.startswith(f"{_TABLE}_")), None)
    if packed is not None and not any(key.startswith(_HEAD) for key in state):
        state[packed.replace(_TABLE, _HEAD)] = state[packed]  # one tensor, read as table and as head
    return state


def packed_keys(state: dict[str, torch.Tensor]) -> list[str]:
    return [key for key in state if not key.endswith((".weight", ".bias", *_PARAMETERS))]


def packed_weights(state: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters that are packed, each with its parts as quant_methods/gguf.py takes them."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key in packed_keys(state):
        module, part = key.rpartition(".")[::2]
        name = next((name for name in ("weight", PAIR, DOWN) if part.startswith(f"{name}_")), part)
        found.setdefault(f"{module}.{name}", {})["weight" + part.removeprefix(name)] = state[key]
    return found


def share_table(model: Any, state: dict[str, torch.Tensor] | None = None) -> None:
    """A table of tokens that is the head too is one parameter, as it is one tensor of `state`. Without one it
    is what an earlier call has found."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(table, PackedEmbedding) or not isinstance(head, QuantLinear):
        return
    if state is not None:
        kind = table.format.name
        own = state.get(f"{_TABLE}_{kind}")
        table.is_head = own is not None and state.get(f"{_HEAD}_{kind}") is own
    if table.is_head:
        head.values = table.values


def _of_mixtral(name: str) -> str:
    """Its files have other names than its class."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"(\.experts\.\d+)\.(w[123])\.", lambda found: f"{found[1]}.{_MIXTRAL[found[2]]}.", name)


def _kind_of(tensor: dict[str, Any]) -> str:
    """A type of plain floats by ggml's name, of blocks by the name of our format."""
    fmt = ggml_format(tensor["type"])
    return tensor["type"] if fmt is None else fmt.name


def _joined(gate: torch.Tensor, up: torch.Tensor, alternate: bool) -> torch.Tensor:
    """[E, I, ...] each as [E, 2I, ...]: gate in front of up, or their rows in turns."""
    up = up.to(gate.dtype)
    return torch.stack([gate, up], 2).flatten(1, 2) if alternate else torch.cat([gate, up], 1)


def _stack(mapped: torch.Tensor, experts: list[dict[str, Any]]) -> tuple[str, torch.Tensor]:
    """The kind of a stack, and its bytes [E, rows, bytes of a row] where they lie, or its numbers."""
    first, rows = experts[0], experts[0]["shape"][0]
    at, count = first["offset"], len(experts) * first["bytes"]
    kind, found = _kind_of(first), mapped[at : at + count]
    if kind not in _DENSE:
        return kind, found.reshape(len(experts), rows, -1)
    if found.data_ptr() % _DENSE[kind].itemsize:
        found = found.clone()
    return kind, found.view(_DENSE[kind]).reshape(len(experts), *first["shape"])


def _add_experts(
    state: dict[str, torch.Tensor],
    layer: str,
    parts: dict[str, tuple[str, torch.Tensor]],
    path: str,
    alternate: bool,
) -> None:
    """Gate and up stay two stacks where they are packed; plain floats are one new tensor. Where rows of gate
    and up alternate, transformers' parameters are [E, in, out]."""
    (gate_kind, gate), (up_kind, up), (down_kind, down) = (parts[part] for part in _PARTS)
    for part, (kind, _) in parts.items():
        if kind not in _DENSE and kind not in GGML_FORMATS:
            wanted = f"wanted f32, f16, bf16, {', '.join(GGML_FORMATS)}"
            raise ValueError(f"{path}: {layer}.*.{part} is {kind}, {wanted}")
    if down_kind in _DENSE:
        state[f"{layer}.{DOWN}"] = down.transpose(1, 2).contiguous() if alternate else down
    else:
        state[f"{layer}.{DOWN}_{down_kind}"] = down
    plain = {kind in _DENSE for kind in (gate_kind, up_kind)}
    if len(plain) == 2:
        raise ValueError(
            f"{path}: {layer}: gate is {gate_kind} and up {up_kind}, wanted both packed or both plain floats"
        )
    if plain == {True}:
        pair = _joined(gate, up, alternate)
        state[f"{layer}.{PAIR}"] = pair.transpose(1, 2).contiguous() if alternate else pair
        return
    if alternate and gate_kind != up_kind:
        wanted = "wanted one type: their rows alternate in transformers' weight"
        raise ValueError(f"{path}: {layer}: gate is {gate_kind} and up {up_kind}, {wanted}")
    state[f"{layer}.{PAIR}_gate_{gate_kind}"] = gate
    state[f"{layer}.{PAIR}_up_{up_kind}"] = up


def _add(state: dict[str, torch.Tensor], tensor: dict[str, Any], found: torch.Tensor, path: str) -> None:
    name, kind, shape = tensor["name"], _kind_of(tensor), tensor["shape"]
    order = None
    if "head_rows" in tensor:
        order = rotary_row_map(shape[0], shape[0] // tensor["head_rows"])
    if kind in _DENSE:
        if found.data_ptr() % _DENSE[kind].itemsize:  # the file aligns its tensors to fewer bytes
            found = found.clone()
        dense = found.view(_DENSE[kind]).reshape(shape)
        if order is not None:
            dense = dense[order.long()]
        state[name] = dense.float() - 1 if tensor.get("subtract_one") else dense
    elif name.endswith(_ROUTERS):
        raise ValueError(f"{path}: {name} is {kind}, wanted f32, f16, bf16: routers are never packed")
    elif kind in GGML_FORMATS and len(shape) == 2 and name.endswith(".weight"):
        state[f"{name}_{kind}"] = found.reshape(shape[0], -1)
        if order is not None:
            state[name.removesuffix("weight") + ROWS] = order
    else:
        wanted = f"wanted a matrix in f32, f16, bf16, {', '.join(GGML_FORMATS)}"
        raise ValueError(f"{path}: {name} is {kind} of {len(shape)} dimensions, {wanted}")
