"""The model of a folder or a config.json without memory, as a plan wants it: nothing is loaded."""

from __future__ import annotations

import os
from typing import Any

from transformers import AutoConfig, PreTrainedModel

from monograph.hf.transformers.config import MonographConfig, loading_dict
from monograph.hf.transformers.gguf_folder import gguf_folder, gguf_state, packed_weights, share_table
from monograph.hf.transformers.meta_model import meta_model
from monograph.hf.transformers.quantizer import Deserialize, MonographQuantizer
from monograph.ops.read_gguf import is_gguf


def planned_model(path: str, format_name: str | None, double_quant: bool) -> PreTrainedModel:
    """On the meta device, its linear layers packed in a format: None for nf4, "none" for dense ones.

    double_quant holds for nf4 and fp4. Of a folder that is quantised the format must be named.
    """
    if is_gguf(path):
        if format_name is not None:
            raise ValueError(f"{path}: a GGUF file has formats of its own, wanted no --format")
        return _model_of_gguf(path)
    folder = os.path.dirname(path) if os.path.isfile(path) else path
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"{path}: has no config.json, wanted a folder of transformers or that file")
    config = AutoConfig.from_pretrained(folder or ".")
    quantization = None
    if format_name != "none":
        name = format_name or "nf4"
        quantization = MonographConfig(name, double_quant=double_quant and name in ("nf4", "fp4"))
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        if format_name is None:
            method = stored.get("quant_method")
            raise ValueError(f"{folder} is quantised by {method!r}; wanted --format, the one to plan with")
        del config.quantization_config
    config.use_cache = False
    return meta_model(config, quantization)


def _model_of_gguf(path: str) -> PreTrainedModel:
    """By the types of the file's tensors."""
    config = AutoConfig.from_pretrained(gguf_folder(path))
    quantizer = MonographQuantizer(
        MonographConfig.from_dict(loading_dict(config.quantization_config)), pre_quantized=True
    )
    del config.quantization_config
    config.use_cache = False
    model = meta_model(config, None)
    packing = Deserialize(quantizer)
    state = gguf_state(path)
    for name, tensors in packed_weights(state).items():
        meta: dict[str, Any] = {part: tensor.to("meta") for part, tensor in tensors.items()}
        packing.convert(meta, model=model, full_layer_name=name)
    share_table(model, state)
    return model
