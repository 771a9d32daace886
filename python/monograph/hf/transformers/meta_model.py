"""A model without memory: names, shapes and dtypes of what `from_pretrained` and PEFT would make.

    model = meta_model(AutoConfig.from_pretrained(folder), MonographConfig("nf4", double_quant=True))

For plans and traces at sizes that no machine here holds.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from monograph.hf.transformers.loading import auto_class
from monograph.hf.transformers.quantizer import MonographConfig, MonographQuantizer, Quantize


def meta_model(
    config: PretrainedConfig, quantization: MonographConfig | None, *, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """The model of a config on the meta device, frozen; linear layers and experts are packed by the rules of
    the quantizer that loads checkpoints. None leaves them dense."""
    with torch.device("meta"):
        model: Any = auto_class(config).from_config(config, dtype=dtype)
    if quantization is not None:
        quantizer = MonographQuantizer(quantization)
        quantizer.choose_modules(model)
        packing = Quantize(quantizer)
        for name in [name for name, _ in model.named_parameters()]:
            if quantizer.param_needs_quantization(model, name):
                weight = model.get_parameter(name)
                packing.convert({name: weight.detach()}, model=model, full_layer_name=name)
    return model.requires_grad_(False)
