"""Modules on packed weights."""

from monograph.nn.packed_embedding import PackedEmbedding
from monograph.nn.packed_experts import PackedExperts
from monograph.nn.quant_linear import QuantLinear
from monograph.nn.replace_linears import replace_linears

__all__ = ["PackedEmbedding", "PackedExperts", "QuantLinear", "replace_linears"]
