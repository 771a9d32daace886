"""Bytes of a flat layout read from mapped files, against a copy of the whole; files that are changed."""

from __future__ import annotations

import mmap
import os
import resource

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from monograph.distributed.file_ranges import RangeReader, read_range, read_small_tensors
from monograph.distributed.layer_bytes import Layout
from monograph.memory import mapped_memory
from monograph.memory.mapped_memory import MappedMemory

linux = pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="wants Linux")


def made(folder, name="a", seed=0):
    """A file of odd tensors, and the tensors mapped from it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "values": torch.randint(0, 256, (257, 129), dtype=torch.uint8, generator=generator),
        "norm": torch.randn(333, generator=generator).bfloat16(),
        "scale": torch.randn(1, generator=generator),
        "stack": torch.randint(0, 256, (3, 64, 40), dtype=torch.uint8, generator=generator),
        "empty": torch.empty(0),
    }
    path = folder / f"{name}.safetensors"
    save_file(tensors, path)
    with safe_open(path, framework="pt") as file:
        return path, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no mapping)


def row_of(tensors):
    """The whole row of bytes, the obvious way: each tensor at the next multiple of 16."""
    row = b""
    for tensor in tensors.values():
        row += bytes(-len(row) % 16) + bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    return row


def shards(tensors, ranks):
    layout = Layout.of(tensors, ranks)
    with RangeReader() as reader:
        parts = [read_range(tensors, layout, rank, reader) for rank in range(ranks)]
    return b"".join(bytes(part.tolist()) for part in parts), reader


def same(tensors, ranks=3):
    row = row_of({name: tensor.clone() for name, tensor in tensors.items()})
    found, reader = shards(tensors, ranks)
    assert found[: len(row)] == row
    assert not any(found[len(row) :])
    return reader


@linux
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
def test_ranges_of_a_mapped_file_are_its_bytes(tmp_path, ranks):
    _, tensors = made(tmp_path)
    reader = same(tensors, ranks)
    assert reader.from_memory == 0
    assert reader.from_files == sum(t.numel() * t.element_size() for t in tensors.values())


@linux
def test_tensors_of_two_files_and_of_memory_in_one_unit(tmp_path):
    _, first = made(tmp_path, "a", 1)
    _, second = made(tmp_path, "b with a space", 2)
    mixed = {f"a.{n}": t for n, t in first.items()} | {f"b.{n}": t for n, t in second.items()}
    mixed["drawn"] = torch.randn(77)
    mixed["turned"] = first["values"].t()
    mixed["middle"] = second["stack"][1]
    mixed["strided"] = second["stack"][:, ::3, 5:17]
    reader = same(mixed, 5)
    copied = mixed["drawn"].numel() * 4 + mixed["turned"].numel() + mixed["strided"].numel()
    assert reader.from_memory == copied


@linux
def test_a_write_to_a_mapped_tensor_is_read_from_memory(tmp_path):
    """The mapping is private: the file keeps what it had, and its bytes would be wrong."""
    path, tensors = made(tmp_path)
    before = path.read_bytes()
    tensors["norm"][7] = 12.0
    reader = same(tensors)
    assert path.read_bytes() == before
    assert reader.from_memory >= tensors["norm"].numel() * 2


@linux
def test_one_written_page_of_many(tmp_path):
    big = torch.arange(3 * 1024 * 1024, dtype=torch.int32)
    save_file({"big": big}, tmp_path / "big.safetensors")
    with safe_open(tmp_path / "big.safetensors", framework="pt") as file:
        tensor = file.get_tensor("big")
    tensor[1_500_000] = -1
    big[1_500_000] = -1
    whole = big.view(torch.uint8)
    share = whole.numel() // 4
    with RangeReader() as reader:
        for rank in range(4):
            part = reader.read({"big": tensor}, Layout.of({"big": tensor}, 4), rank)
            assert torch.equal(part, whole[rank * share : (rank + 1) * share])
    assert (reader.from_files, reader.from_memory) == (3 * share, share)  # that rank's alone


@linux
@pytest.mark.parametrize("how", ["replaced", "deleted", "replaced by a folder"])
def test_a_file_that_is_gone_is_read_from_the_mapping(tmp_path, how):
    path, tensors = made(tmp_path)
    row = row_of({name: tensor.clone() for name, tensor in tensors.items()})
    if how == "replaced":
        other, _ = made(tmp_path, "other", seed=9)
        os.replace(other, path)
    else:
        path.unlink()
    if how == "replaced by a folder":
        path.mkdir()
    found, reader = shards(tensors, 2)
    assert found[: len(row)] == row
    assert reader.from_files == 0


@linux
def test_a_file_changed_in_place_gives_what_the_mapping_gives(tmp_path):
    path, tensors = made(tmp_path)
    with open(path, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"\x5a" * 500)
    same(tensors)


@linux
def test_a_file_cut_short_is_named_instead_of_a_signal(tmp_path):
    path, tensors = made(tmp_path)
    os.truncate(path, 64)
    with pytest.raises(
        ValueError, match=r"its file has 64 bytes, wanted \d+: it was cut while it was mapped"
    ):
        shards(tensors, 2)


@linux
def test_two_mappings_of_one_file_that_touch(tmp_path):
    """A tensor may lie over a border of mappings: one of a file's pages with other rights, or two files."""
    page = mmap.PAGESIZE
    path = tmp_path / "pages"
    path.write_bytes(os.urandom(4 * page))
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 4 * page, access=mmap.ACCESS_COPY)
    tensor = torch.frombuffer(mapped, dtype=torch.uint8)[100 : 3 * page + 50]
    mapped.madvise(mmap.MADV_DONTFORK, page, page)  # splits the mapping in three
    areas = [a for a in mapped_memory.mapped_areas() if a.path == str(path)]
    assert len(areas) == 3
    assert same({"t": tensor}).from_memory == 0


@linux
def test_nothing_of_the_file_is_mapped_in(tmp_path):
    """Neither page faults nor copies: memory grows by the share alone."""
    size = 64 << 20
    save_file({"t": torch.zeros(size, dtype=torch.uint8)}, tmp_path / "big.safetensors")

    def status(key):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))

    with safe_open(tmp_path / "big.safetensors", framework="pt") as file:
        tensor = file.get_tensor("t")
    before = status("RssFile"), status("RssAnon")
    part = read_range({"t": tensor}, Layout.of({"t": tensor}, 4), 1)
    assert status("RssFile") - before[0] < 1 << 20
    assert status("RssAnon") - before[1] < part.numel() + (2 << 20)


@pytest.mark.parametrize("missing", ["_MAPS", "_PAGEMAP"])
def test_without_proc_everything_is_copied(tmp_path, monkeypatch, missing):
    _, tensors = made(tmp_path)
    monkeypatch.setattr(mapped_memory, missing, str(tmp_path / "none"))
    assert same(tensors).from_files == 0


def test_meta_tensors_have_meta_shards():
    tensor = torch.empty(100, 10, device="meta")
    part = read_range({"t": tensor}, Layout.of({"t": tensor}, 4), 1)
    assert part.is_meta
    assert part.shape == (1008,)


@linux
def test_files_are_closed(tmp_path):
    _, tensors = made(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    same(tensors)
    assert len(os.listdir("/proc/self/fd")) == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before
    with MappedMemory() as memory:
        assert memory.extents(0, 16) is None


@linux
def test_small_tensors_are_read_and_nothing_around_them(tmp_path):
    """Headers and small tensors by calls; of a file that is broken its loader speaks."""
    big = torch.zeros(16 << 20, dtype=torch.uint8)
    save_file({"big": big, "norm": torch.ones(100), "zone": torch.ones(9)}, tmp_path / "a.safetensors")
    with open(tmp_path / "a.safetensors", "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (tmp_path / "b.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")  # left to the loader

    def read_bytes():
        with open("/proc/self/io") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("rchar"))

    before = read_bytes()
    read_small_tensors(tmp_path)
    assert 436 < read_bytes() - before < 100_000
