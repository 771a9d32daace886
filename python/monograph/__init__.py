"""Monograph fine-tunes quantised language models as one graph.

import monograph as mg

w = mg.quantize(weight, "nf4", double_quant=True)
w.dequantize(torch.bfloat16)
mg.show_config()
"""

from monograph import nn, ops, packing
from monograph.bitsandbytes import dequantize_4bit, from_bitsandbytes, to_bitsandbytes
from monograph.packed_weight import PackedWeight, linear, quantize
from monograph.show_config import show_config

__all__ = [
    "PackedWeight",
    "dequantize_4bit",
    "from_bitsandbytes",
    "linear",
    "nn",
    "ops",
    "packing",
    "quantize",
    "show_config",
    "to_bitsandbytes",
]
