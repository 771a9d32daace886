"""Documents that lie one after another in a row of tokens, as ascending offsets say.

Document d owns the tokens [offsets[d], offsets[d + 1]). Offsets are int32 tensors of fixed length, padded
with the number of tokens, so that no shape changes between batches. Tokens before the first document and
after the last belong to none.
"""

from __future__ import annotations

import torch

from monograph.ops.argument_checks import dtype_name, require


def document_of(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """The number of the document each token belongs to; -1 before the first, and count after the last."""
    positions = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, positions, right=True) - 1


def check_offsets(op: str, what: str, offsets: torch.Tensor, tokens: int) -> None:
    """Reads the offsets."""
    kind = f"{dtype_name(offsets.dtype)} with {offsets.dim()} dimensions"
    require(
        offsets.dtype == torch.int32 and offsets.dim() == 1, op, f"{what} is {kind}, wanted int32 with one"
    )
    found = offsets.tolist()
    ascending = all(a <= b for a, b in zip([0, *found], [*found, tokens], strict=True))
    require(ascending, op, f"{what} is {found}, wanted ascending offsets from 0 to {tokens} tokens")
