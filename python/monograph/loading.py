"""from_pretrained: a causal language model on packed weights, from a folder that is quantised or not."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from monograph import transformers_attention
from monograph.transformers_config import loading_dict
from monograph.transformers_quantizer import MonographConfig

MODELOPT_FILE = "hf_quant_config.json"


def stored_quantization(folder: str | os.PathLike[str], config: Any = None) -> dict[str, Any] | None:
    """The quantization_config of a folder; None if it is not quantised.

    ModelOpt may write it to a file of its own only, which transformers does not read.
    """
    config = AutoConfig.from_pretrained(folder) if config is None else config
    stored = getattr(config, "quantization_config", None)
    if stored is None and os.path.isfile(os.path.join(folder, MODELOPT_FILE)):
        with open(os.path.join(folder, MODELOPT_FILE), encoding="utf-8") as file:
            stored = {"quant_method": "modelopt", **json.load(file)}
    return stored


def from_pretrained(
    folder: str | os.PathLike[str],
    quantization: MonographConfig | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str = transformers_attention.NAME,
    **options: Any,
) -> PreTrainedModel:
    """Loads `folder` with transformers; `options` go to its `from_pretrained`.

    A folder that is quantised is taken as it is, if bitsandbytes, `monograph quantize`, transformers (fp8),
    compressed-tensors or ModelOpt wrote it: its packed bytes are mapped from the file, not copied or
    repacked, and what it left dense stays dense. docs/formats.md has the table. Only weights are packed;
    rounding of activations, which such a folder may want for serving, is left out. A folder of 16- or 32-bit
    weights is quantised while it loads if `quantization` is given, and else stays dense.

        model = mg.from_pretrained("Llama-3.1-8B-nf4")
        model = mg.from_pretrained("Llama-3.1-8B", mg.MonographConfig("nf4", double_quant=True))
    """
    config = options.pop("config", None) or AutoConfig.from_pretrained(folder)
    stored = stored_quantization(folder, config)
    if stored is not None:
        if quantization is not None:
            method = stored.get("quant_method")
            raise ValueError(f"{folder}: already quantised by {method!r}; wanted quantization=None")
        try:
            config.quantization_config = loading_dict(stored)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
    return AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        quantization_config=quantization,
        dtype=dtype,
        attn_implementation=attn_implementation,
        **options,
    )
