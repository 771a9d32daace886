"""Monograph fine-tunes quantised language models as one graph.

In short:

    import monograph as mg

    model = mg.from_pretrained(folder, mg.MonographConfig("nf4", double_quant=True))
    model = mg.add_lora(model, LoraConfig(r=16, target_modules="all-linear"))
    w = mg.quantize(weight, "nf4", double_quant=True)
    mg.show_config()
"""

import importlib
from typing import TYPE_CHECKING, Any

from monograph import nn, ops, packing
from monograph.memory.offload.activations import offload_activations
from monograph.ops.offload_marks import mark_not_offload
from monograph.ops.show_config import show_config
from monograph.quant.packed_weight import PackedWeight, linear, quantize
from monograph.quant.quant_methods.bitsandbytes import dequantize_4bit, from_bitsandbytes, to_bitsandbytes
from monograph.quant.quantized_tensor import QuantizedTensor, split_quantize
from monograph.upstream.tested_versions import warn_if_untried
from monograph.upstream.when_imported import when_imported

if TYPE_CHECKING:
    from monograph.diagnosis import doctor
    from monograph.distributed.expert_adapter import whole_adapter
    from monograph.distributed.expert_parallel import expert_parallel
    from monograph.distributed.shard import shard
    from monograph.distributed.unshard import unshard, unsharded
    from monograph.hf.calibration import calibrate
    from monograph.hf.optimize import adapter_start, add_lora, optimize
    from monograph.hf.transformers.loading import from_pretrained
    from monograph.hf.transformers.quantizer import MonographConfig
    from monograph.many.adapter_run import AdapterRun
    from monograph.many.client import AdamParams, TrainingService
    from monograph.many.step import ManyStep

__all__ = [
    "AdamParams",
    "AdapterRun",
    "ManyStep",
    "MonographConfig",
    "PackedWeight",
    "QuantizedTensor",
    "TrainingService",
    "adapter_start",
    "add_lora",
    "calibrate",
    "dequantize_4bit",
    "doctor",
    "expert_parallel",
    "from_bitsandbytes",
    "from_pretrained",
    "linear",
    "mark_not_offload",
    "nn",
    "offload_activations",
    "ops",
    "optimize",
    "packing",
    "quantize",
    "shard",
    "show_config",
    "split_quantize",
    "to_bitsandbytes",
    "unshard",
    "unsharded",
    "whole_adapter",
]

# What needs transformers or PEFT is imported when first used: the operators alone need torch only.
_ON_FIRST_USE = {
    "AdamParams": "monograph.many.client",
    "AdapterRun": "monograph.many.adapter_run",
    "ManyStep": "monograph.many.step",
    "TrainingService": "monograph.many.client",
    "MonographConfig": "monograph.hf.transformers.quantizer",
    "adapter_start": "monograph.hf.optimize",
    "add_lora": "monograph.hf.optimize",
    "calibrate": "monograph.hf.calibration",
    "doctor": "monograph.diagnosis",
    "expert_parallel": "monograph.distributed.expert_parallel",
    "from_pretrained": "monograph.hf.transformers.loading",
    "optimize": "monograph.hf.optimize",
    "shard": "monograph.distributed.shard",
    "unshard": "monograph.distributed.unshard",
    "unsharded": "monograph.distributed.unshard",
    "whole_adapter": "monograph.distributed.expert_adapter",
}


_MODULES_ON_FIRST_USE = {"offload": "monograph.memory.offload"}


def __getattr__(name: str) -> Any:
    if name in _MODULES_ON_FIRST_USE:
        return importlib.import_module(_MODULES_ON_FIRST_USE[name])
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'monograph' has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)


warn_if_untried("torch")
when_imported("peft", "monograph.hf.peft.packed_layers")
when_imported("torch._dynamo", "monograph.ops.providers")
when_imported("torch._inductor.decomposition", "monograph.ops.inductor_decompositions")
when_imported("torch._inductor.lowering", "monograph.ops.inductor_fallbacks")
