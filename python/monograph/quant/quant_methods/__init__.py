"""How producers write packed weights into checkpoints; one producer, one file.

`quant_method_of(config)` is the one that a folder's quantization_config names, `quant_method_saving(format)`
the one by which a format is saved. A new producer is a class in a file of its own and a place in
QUANT_METHODS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monograph.quant.quant_methods.bitsandbytes import BitsAndBytes
from monograph.quant.quant_methods.compressed_tensors import CompressedTensors
from monograph.quant.quant_methods.fp8_block import Fp8Block
from monograph.quant.quant_methods.gguf import Gguf
from monograph.quant.quant_methods.gpt_oss import GptOss
from monograph.quant.quant_methods.modelopt import ModelOpt
from monograph.quant.quant_methods.monograph_columns import MonographColumns
from monograph.quant.quant_methods.quant_method import QuantMethod

QUANT_METHODS: tuple[QuantMethod, ...] = (
    BitsAndBytes(),
    Fp8Block(),
    CompressedTensors(),
    ModelOpt(),
    GptOss(),
    MonographColumns(),
    Gguf(),
)

# Layouts that the native tool turns, once and without loss.
TURNED_FIRST = ("gptq", "awq", "auto-round", "intel/auto-round")


def quant_method_of(config: Mapping[str, Any]) -> QuantMethod:
    """The method of a folder with this quantization_config, whose formats are known to be readable."""
    name = config.get("quant_method")
    for method in QUANT_METHODS:
        if name in method.methods:
            method.formats(config)
            return method
    if name in TURNED_FIRST:
        raise ValueError(f"quant_method is {name!r}: turn the folder first: monograph convert FOLDER OUT")
    known = ", ".join(known for method in QUANT_METHODS for known in method.methods)
    raise ValueError(f"quant_method is {name!r}, wanted one of {known}")


def quant_method_saving(format: str) -> QuantMethod:
    """The method by which a model quantised to `format` is saved."""
    for method in QUANT_METHODS:
        if format in method.saves:
            return method
    known = ", ".join(name for method in QUANT_METHODS for name in method.saves)
    raise ValueError(f"format {format} is saved by no quant method, wanted one of {known}")
