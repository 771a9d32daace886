"""PackedEmbedding: an nn.Embedding whose table stays packed; the rows of the tokens are decoded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from monograph.nn.lazy_weight import weight_of
from monograph.ops.dequantize import dequantize
from monograph.ops.formats import BlockShape
from monograph.ops.layout import make_layout
from monograph.quant.packed_weight import PackedWeight


class PackedEmbedding(nn.Embedding):
    """A frozen table of tokens in blocks that lie inside a row (those of a GGUF file).

    `values` is an ordinary uint8 parameter, and `weight` honest for code that looks at it, as those of
    QuantLinear. A row is what the dequantised table has, rounded once to the type of the weight, times
    `scale` in that type where a model scales its embedding.
    """

    is_quantized = True
    is_head = False  # whether the head of the model reads the same bytes
    dense_type: type[nn.Embedding] = nn.Embedding  # what it took the place of

    values: nn.Parameter

    def __init__(
        self, packed: PackedWeight, padding_idx: int | None = None, scale: float | None = None
    ) -> None:
        nn.Module.__init__(self)  # nn.Embedding's own would allocate a dense table
        whole = len(packed.shape) == 2 and not packed.transposed and not packed.scales
        if not whole or packed.format.shape is not BlockShape.INTERLEAVED:
            raise ValueError(f"PackedEmbedding: the weight is {packed!r}, wanted rows of ggml's blocks")
        self.num_embeddings, self.embedding_dim = packed.shape
        self.padding_idx = padding_idx
        self.max_norm, self.norm_type = None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self.format = packed.format
        self.block_size = packed.block_size
        self.scale = scale
        self.weight_dtype = packed.dtype
        self.register_parameter("values", nn.Parameter(packed.values, requires_grad=False))

    @property
    def packed(self) -> PackedWeight:
        shape = (self.num_embeddings, self.embedding_dim)
        values = self.values.detach()
        return PackedWeight(self.format, shape, self.block_size, values, (), self.weight_dtype)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return weight_of(self.packed, self.weight_dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(f"weight = {type(value).__name__}: a PackedEmbedding keeps packed bytes")
        super().__setattr__(name, value)

    def dense(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """The layer that this one took the place of, with the decoded table."""
        options: dict[str, Any] = {} if self.scale is None else {"embed_scale": self.scale}
        with torch.device("meta"):
            made: Any = self.dense_type(self.num_embeddings, self.embedding_dim, self.padding_idx, **options)
        made.weight = nn.Parameter(self.packed.dequantize(dtype or self.weight_dtype))
        if self.scale is not None:
            made.embed_scale = torch.tensor(self.scale, device=self.values.device)
        return made

    def reset_parameters(self) -> None:
        """Packed weights are loaded, never drawn at random."""

    def _apply(self, fn: Any, recurse: bool = True) -> PackedEmbedding:
        # Casting a model casts the dtype that `weight` reports, and no stored byte.
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return super()._apply(fn, recurse)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self.values.index_select(0, input.reshape(-1))
        layout = make_layout(self.format.number, self.block_size, (rows.shape[0], self.embedding_dim))
        found = dequantize(rows, [], layout, self.weight_dtype).reshape(*input.shape, self.embedding_dim)
        if self.scale is None:
            return found
        return found * torch.tensor(self.scale, dtype=found.dtype, device=found.device)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format.name}"
