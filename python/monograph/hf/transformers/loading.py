"""from_pretrained: a causal language model on packed weights, from a folder that is quantised or not."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)

from monograph.distributed.file_ranges import read_small_tensors
from monograph.hf.transformers import attention, recurrent_layers
from monograph.hf.transformers.config import loading_dict
from monograph.hf.transformers.gguf_folder import gguf_folder, gguf_of, gguf_state, packed_keys, share_table
from monograph.hf.transformers.quantizer import MonographConfig
from monograph.memory.base_memory.read_ahead import limit_base_memory
from monograph.memory.base_memory.sizes import bytes_of
from monograph.ops.read_gguf import is_gguf
from monograph.packing.stateful_layers import guard_packed

MODELOPT_FILE = "hf_quant_config.json"


# Options of `from_pretrained` that say where files lie, for the Hub's library and for transformers' configs.
_FILE_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
_CONFIG_OPTIONS = (*_FILE_OPTIONS, "trust_remote_code", "code_revision")


def _file_of(folder: str | os.PathLike[str], name: str, options: dict[str, Any]) -> str | None:
    """One file of a folder, or of a repository on the Hub, which is downloaded alone; None without it."""
    if os.path.isdir(folder):
        path = os.path.join(folder, options.get("subfolder") or "", name)
        return path if os.path.isfile(path) else None
    try:
        return hf_hub_download(str(folder), name, **options)
    except EntryNotFoundError:
        return None


def stored_quantization(
    folder: str | os.PathLike[str], config: Any = None, **options: Any
) -> dict[str, Any] | None:
    """The quantization_config of a folder; None if it is not quantised. `options` as for `from_pretrained`.

    ModelOpt may write it to a file of its own only, which transformers does not read.
    """
    known = {name: options[name] for name in _CONFIG_OPTIONS if options.get(name) is not None}
    config = AutoConfig.from_pretrained(folder, **known) if config is None else config
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        plain = stored.get("quant_method") == "gguf" and not stored.get("packed")
        return None if plain else stored
    files = {name: known[name] for name in _FILE_OPTIONS if name in known}
    path = _file_of(folder, MODELOPT_FILE, files)
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        return {"quant_method": "modelopt", **json.load(file)}


# Endings of tensors that are codes or their scales, and nothing else.
_PACKED_ENDINGS = (".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight.absmax", ".qweight")


def _refuse_unnamed_codes(folder: str | os.PathLike[str], subfolder: str | None) -> None:
    """transformers would start the layers of packed tensors at random, and say so in a report alone."""
    for path in sorted(pathlib.Path(folder, subfolder or "").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            packed = [name for name in file.keys() if name.endswith(_PACKED_ENDINGS)]  # noqa: SIM118
        if packed:
            raise ValueError(
                f"{path}: {packed[0]} belongs to a packed weight, and config.json has no "
                "quantization_config, wanted that of the library that wrote it"
            )


def _one_dtype(dtype: Any, torch_dtype: Any) -> Any:
    """`dtype`, or what was given under transformers' older name for it; bfloat16 without either."""
    if dtype is not None and torch_dtype is not None and dtype != torch_dtype:
        raise ValueError(f"dtype is {dtype} and torch_dtype is {torch_dtype}, wanted one of the two")
    asked = torch_dtype if dtype is None else dtype
    return torch.bfloat16 if asked is None else asked


# Families whose folders hold a vision tower beside the text model. As text alone their modules have other
# names, and an adapter would not fit the folder.
_WITH_VISION = ("qwen3_5", "qwen3_5_moe")


def auto_class(config: Any) -> Any:
    whole = any(name.endswith("ForConditionalGeneration") for name in config.architectures or ())
    return (
        AutoModelForImageTextToText if whole and config.model_type in _WITH_VISION else AutoModelForCausalLM
    )


def default_attention(device_map: Any) -> str | None:
    """Ours on a CPU; elsewhere transformers chooses first, as the device may have no kernel for the model."""
    devices = device_map.values() if isinstance(device_map, dict) else [device_map or "cpu"]
    return attention.NAME if all(str(device) == "cpu" for device in devices) else None


def _class_of_gguf(model_class: Any, config: Any) -> Any:
    """The class itself: transformers' auto classes want a folder."""
    (name,) = config.architectures
    if model_class is AutoModelForSequenceClassification:
        name = name.replace("ForCausalLM", "ForSequenceClassification")
    elif model_class is not None and model_class is not AutoModelForCausalLM:
        return model_class
    return getattr(transformers, name)


def _load_gguf(
    file: str, folder: str, quantization: MonographConfig | None, model_class: Any, config: Any, options: Any
) -> PreTrainedModel:
    """The model of a mapped file; plain floats are quantised while they load if `quantization` is given."""
    state = gguf_state(file)
    packed = packed_keys(state)
    if packed and quantization is not None:
        raise ValueError(f"{file}: already quantised ({packed[0]}); wanted quantization=None")
    if not packed:
        del config.quantization_config
    if any(key.startswith("lm_head.weight_") for key in packed):
        config.tie_word_embeddings = False  # one tensor all the same, in two modules that read it
    model = _class_of_gguf(model_class, config).from_pretrained(
        None, config=config, state_dict=state, quantization_config=quantization, **options
    )
    model.name_or_path = model.config.name_or_path = file
    share_table(model, state)
    if os.path.isfile(os.path.join(folder, "generation_config.json")):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def from_pretrained(
    folder: str | os.PathLike[str],
    quantization: MonographConfig | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    model_class: Any = None,
    base_memory: int | str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Loads `folder` with transformers; `options` go to its `from_pretrained`.

    Attention is ours, `attn_implementation="monograph"`, on a CPU, and on CUDA where
    `torch.nn.attention.varlen` can compute it; on other devices of a `device_map` transformers chooses.
    A folder of Qwen3.5 with a vision tower is loaded whole, so that adapters have the names of its weights.

    `dtype` is bfloat16 unless given, as a torch.dtype, a name ("float16") or "auto" for the folder's own;
    `torch_dtype` is its older name. What is not packed is cast to it, and packed layers report it; modules
    that transformers keeps in float32 for a model stay so. `folder` may be a name on the Hub: `revision`,
    `token`, `subfolder`, `cache_dir` and `trust_remote_code` hold for its config as well.

    `folder` may be a GGUF file of this machine: config, tokenizer and weights are those of the file, its
    blocks are mapped as they lie there, the table of tokens too (docs/how_to/gguf.md).

    A folder that is quantised is taken as it is, if bitsandbytes, `monograph quantize`, transformers (fp8),
    compressed-tensors or ModelOpt wrote it: its packed bytes are mapped from the file, not copied or
    repacked, and what it left dense stays dense. docs/reference/formats.md has the table. Only weights are
    packed; rounding of activations, which such a folder may want for serving, is left out. A folder of 16- or
    32-bit weights is quantised while it loads if `quantization` is given, and else stays dense.

    `model_class` is another class of transformers than that for causal language models, such as
    AutoModelForSequenceClassification.

    `base_memory` ("3GiB", or bytes) is how much of the mapped files may be in memory at a time, for a base
    that is larger: docs/explain/offload.md. `monograph.memory.base_memory.base_memory_of(model)` tells
    what it does.

        model = mg.from_pretrained("Llama-3.1-8B-nf4")
        model = mg.from_pretrained("Llama-3.1-8B", mg.MonographConfig("nf4", double_quant=True))
    """
    dtype = _one_dtype(dtype, options.pop("torch_dtype", None))
    if is_gguf(folder):
        folder = gguf_folder(folder)
    where = {name: options[name] for name in _CONFIG_OPTIONS if options.get(name) is not None}
    config = options.pop("config", None) or AutoConfig.from_pretrained(folder, **where)
    stored = stored_quantization(folder, config, **where)
    file = gguf_of(folder)
    if stored is not None:
        if file is None and quantization is not None:
            method = stored.get("quant_method")
            raise ValueError(f"{folder}: already quantised by {method!r}; wanted quantization=None")
        try:
            config.quantization_config = loading_dict(stored)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
    elif os.path.isdir(folder):
        _refuse_unnamed_codes(folder, options.get("subfolder"))
    if options.get("distributed_config") is not None and (stored or quantization) is not None:
        raise ValueError(
            f"{folder}: distributed_config cuts weights while they load, packed ones do not fit its parts; "
            "wanted None, and fully_shard or monograph.shard on the model"
        )
    chosen = attn_implementation or default_attention(options.get("device_map"))
    if base_memory is not None:
        bytes_of(base_memory)
        if os.path.isdir(folder):
            read_small_tensors(folder)
    options |= {"dtype": dtype, "attn_implementation": chosen}
    if file is not None:
        model = _load_gguf(file, os.fspath(folder), quantization, model_class, config, options)
    else:
        model = (model_class or auto_class(config)).from_pretrained(
            folder, config=config, quantization_config=quantization, **options
        )
    if chosen is None and len({parameter.device.type for parameter in model.parameters()}) == 1:
        attention.put_on(model, None)
    recurrent_layers.take_over(model)
    guard_packed(model)
    if base_memory is not None:
        limit_base_memory(model, base_memory)
    return model
