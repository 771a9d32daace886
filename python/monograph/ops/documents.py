"""Documents that lie one after another in a row of tokens, as ascending offsets say.

Document d owns the tokens [offsets[d], offsets[d + 1]). Offsets are int32 tensors of fixed length, padded
with the number of tokens, so that no shape changes between batches. Tokens before the first document and
after the last belong to none.
"""

from __future__ import annotations

import torch

from monograph.ops.argument_checks import dtype_name, require, require_on_device


def document_of(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """The number of the document each token belongs to; -1 before the first, and count after the last."""
    positions = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, positions, right=True) - 1


def assert_ascending(op: str, what: str, offsets: torch.Tensor, tokens: int) -> None:
    """An assertion of the device: the host reads nothing."""
    ascending = (offsets.diff() >= 0).all() & (offsets >= 0).all() & (offsets <= tokens).all()
    message = f"{what} is wrong, wanted ascending offsets from 0 to {tokens} tokens"
    require_on_device(ascending, op, message)


def check_offsets(op: str, what: str, offsets: torch.Tensor, tokens: int) -> None:
    """Reads the offsets, on their device."""
    kind = f"{dtype_name(offsets.dtype)} with {offsets.dim()} dimensions"
    require(
        offsets.dtype == torch.int32 and offsets.dim() == 1, op, f"{what} is {kind}, wanted int32 with one"
    )
    if offsets.device.type != "cpu":
        assert_ascending(op, what, offsets, tokens)
        return
    found = offsets.tolist()
    in_order = all(a <= b for a, b in zip([0, *found], [*found, tokens], strict=True))
    require(in_order, op, f"{what} is {found}, wanted ascending offsets from 0 to {tokens} tokens")


def inside_documents(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Whether each token belongs to one."""
    document = document_of(offsets, tokens)
    return (document >= 0) & (document < offsets.numel() - 1)


def chunks_of(offsets: torch.Tensor, size: int) -> torch.Tensor:
    """(document, number in it) of each chunk of `size` tokens, [chunks, 2] in int64. The host reads how many
    there are."""
    counts = (offsets.diff().to(torch.int64) + size - 1) // size
    ends = counts.cumsum(0)
    total = int(ends[-1]) if counts.numel() else 0
    number = torch.arange(total, device=offsets.device)
    document = torch.searchsorted(ends, number, right=True)
    return torch.stack((document, number - (ends - counts)[document]), dim=1)
