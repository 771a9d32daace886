"""How producers write packed weights into checkpoints; one producer, one file.

`spelling_of(config)` is the one that a folder's quantization_config names, `spelling_saving(format)` the one
in which a format is saved. A new producer is a class in a file of its own and a place in SPELLINGS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monograph.quant.quant_methods.bitsandbytes import BitsAndBytes
from monograph.quant.quant_methods.compressed_tensors import CompressedTensors
from monograph.quant.quant_methods.fp8_block import Fp8Block
from monograph.quant.quant_methods.gpt_oss import GptOss
from monograph.quant.quant_methods.modelopt import ModelOpt
from monograph.quant.quant_methods.quant_method import Spelling

SPELLINGS: tuple[Spelling, ...] = (BitsAndBytes(), Fp8Block(), CompressedTensors(), ModelOpt(), GptOss())


def spelling_of(config: Mapping[str, Any]) -> Spelling:
    """The spelling of a folder with this quantization_config, whose formats are known to be readable."""
    method = config.get("quant_method")
    for spelling in SPELLINGS:
        if method in spelling.methods:
            spelling.formats(config)
            return spelling
    known = ", ".join(method for spelling in SPELLINGS for method in spelling.methods)
    raise ValueError(f"quant_method is {method!r}, wanted one of {known}")


def spelling_saving(format: str) -> Spelling:
    """The spelling in which a model quantised to `format` is saved."""
    for spelling in SPELLINGS:
        if format in spelling.saves:
            return spelling
    known = ", ".join(name for spelling in SPELLINGS for name in spelling.saves)
    raise ValueError(f"format {format} is saved in no spelling, wanted one of {known}")
