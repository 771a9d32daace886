"""The row of bytes that a unit's frozen tensors lie in, against one built by hand with bytes."""

from __future__ import annotations

import pytest
import torch

from monograph.distributed.file_ranges import read_range
from monograph.distributed.layer_bytes import Layout

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float16, torch.int64)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random bytes in every dtype and odd shapes: every pattern of NaN too."""
    drawn = torch.Generator().manual_seed(seed)
    shapes = [(192, 164), (328,), (), (7, 3, 5), (1,), (0, 4), (13, 11)]
    found = {}
    for number, shape in enumerate(shapes * len(DTYPES)):
        dtype = DTYPES[number // len(shapes)]
        count = torch.Size(shape).numel() * dtype.itemsize
        data = torch.randint(256, (count,), dtype=torch.uint8, generator=drawn)
        found[f"layer.{number}"] = data.view(dtype).view(shape)
    found["all"] = torch.arange(256, dtype=torch.uint8).repeat(256)
    found["halves"] = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return found


def own_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 64])
def test_a_row_of_shards_holds_every_byte(ranks: int) -> None:
    given = tensors()
    layout = Layout.of(given, ranks)
    wanted = b""
    for tensor in given.values():
        wanted += own_bytes(tensor)
        wanted += bytes(-len(wanted) % 16)
    shards = [read_range(given, layout, rank) for rank in range(ranks)]
    assert {shard.numel() for shard in shards} == {layout.bytes_per_rank}
    assert layout.bytes_per_rank % 16 == 0
    row = torch.cat(shards)
    assert row.numel() == layout.nbytes == layout.tensor_bytes + layout.padding
    assert bytes(row.tolist()) == wanted.ljust(layout.nbytes, b"\0")
    assert layout.padding < 16 * (len(given) + ranks + 1)
    for name, view in layout.views(row).items():
        assert view.dtype == given[name].dtype
        assert view.shape == given[name].shape
        assert own_bytes(view) == own_bytes(given[name])
        assert view.numel() == 0 or view.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()


def test_parts_cut_every_tensor_once() -> None:
    given = tensors()
    layout = Layout.of(given, 5)
    covered: dict[str, int] = dict.fromkeys(given, 0)
    for rank in range(5):
        for piece, begin, end, place in layout.parts(rank):
            assert begin == covered[piece.name]
            assert 0 <= place < layout.bytes_per_rank
            covered[piece.name] = end
    assert covered == {piece.name: piece.nbytes for piece in layout.pieces}


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64, 9000])
def test_rows_are_cut_as_torch_cuts_them(ranks: int) -> None:
    """`Shard(0)` of a DTensor is torch.chunk, and their number is that of one rank."""
    layout = Layout.of(tensors(), ranks)
    assert layout.rows == Layout.of(tensors(), 1).nbytes // 16
    parts = [len(part) for part in torch.chunk(torch.empty(layout.rows), ranks)]
    assert [layout.rows_of(rank) for rank in range(ranks)] == parts + [0] * (ranks - len(parts))
    assert max(parts) * 16 == layout.bytes_per_rank


def test_shapes_are_enough() -> None:
    given = tensors()
    meta = {name: tensor.to("meta") for name, tensor in given.items()}
    assert Layout.of(meta, 4096) == Layout.of(given, 4096)
    assert hash(Layout.of(meta, 4)) == hash(Layout.of(given, 4))
    assert Layout.of(meta, 4) != Layout.of(meta, 8)


def test_padding_of_a_large_layer_is_small() -> None:
    """Llama 405B's layer in nf4 on 4,096 ranks: at most 2 %."""
    hidden, inter, kv = 16384, 53248, 1024
    sizes = (hidden * hidden, 2 * kv * hidden, hidden * hidden, 3 * hidden * inter)
    meta = {f"{n}": torch.empty(size // 2, dtype=torch.uint8, device="meta") for n, size in enumerate(sizes)}
    layout = Layout.of(meta, 4096)
    assert layout.padding <= 0.02 * layout.tensor_bytes


def test_what_is_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks is 0, wanted 1 or more"):
        Layout.of({}, 0)
    with pytest.raises(ValueError, match="rank is 4, wanted 0 to 3"):
        Layout.of(tensors(), 4).of_rank(4)
    assert Layout.of({}, 3).nbytes == 0
