"""from_pretrained: a causal language model on packed weights, from a folder that is quantised or not."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from monograph import transformers_attention
from monograph.transformers_quantizer import METHOD, MonographConfig


def from_pretrained(
    folder: str | os.PathLike[str],
    quantization: MonographConfig | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str = transformers_attention.NAME,
    **options: Any,
) -> PreTrainedModel:
    """Loads `folder` with transformers; `options` go to its `from_pretrained`.

    A folder that bitsandbytes or `monograph quantize` wrote is taken as it is: its packed bytes are mapped
    from the file, not copied or repacked, and what it left dense stays dense. A folder of 16- or 32-bit
    weights is quantised while it loads if `quantization` is given, and else stays dense.

        model = mg.from_pretrained("Llama-3.1-8B-nf4")
        model = mg.from_pretrained("Llama-3.1-8B", mg.MonographConfig("nf4", double_quant=True))
    """
    config = options.pop("config", None) or AutoConfig.from_pretrained(folder)
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        method = stored.get("quant_method")
        if quantization is not None:
            raise ValueError(f"{folder}: already quantised by {method!r}; wanted quantization=None")
        if method == "bitsandbytes":
            config.quantization_config = MonographConfig.from_bitsandbytes(stored).loading_dict()
        elif method != METHOD:
            raise ValueError(f"{folder}: quant_method is {method!r}, wanted 'bitsandbytes'")
    return AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        quantization_config=quantization,
        dtype=dtype,
        attn_implementation=attn_implementation,
        **options,
    )
