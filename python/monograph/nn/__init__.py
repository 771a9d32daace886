"""Modules on packed weights."""

from monograph.nn.quant_linear import QuantLinear
from monograph.nn.replace_linears import replace_linears

__all__ = ["QuantLinear", "replace_linears"]
