"""pack, pack_stream, the sampler and the picture: against searches, TRL, and themselves on other ranks."""

import json
import subprocess
import sys
import time

import pytest
import torch
from torch.library import opcheck
from torch.utils.data import DataLoader

import monograph as mg  # noqa: F401  (loads the operators)
from monograph.bench.packing import CAPACITY, LENGTHS, trl_row_count
from monograph.ops.pack import portable_pack, portable_pack_stream
from monograph.packing import (
    PackedDataset,
    PackedSampler,
    Piece,
    cut,
    draw_rows,
    measure_efficiency,
    pack,
    pack_stream,
    text_picture,
)
from monograph.packing.__main__ import main
from monograph.packing.sampler import _shuffled

ops = torch.ops.monograph


def random_lengths(count, seed=0, mean=60.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * 1.1).exp().mul(mean).long()


def tokens_of(pieces):
    """Every token of every document as (document, position)."""
    return [(p.document, p.start + i) for p in pieces for i in range(p.length)]


@pytest.mark.parametrize("overlong", ["truncate", "split"])
@pytest.mark.parametrize("strategy", ["best_fit_decreasing", "first_fit"])
def test_every_token_is_in_exactly_one_row(strategy, overlong):
    lengths = random_lengths(700)
    rows = pack(lengths, 256, strategy=strategy, overlong=overlong, max_documents=9)
    got = [tokens_of(row) for row in rows]
    assert all(1 <= len(row) <= 256 for row in got)
    assert all(len(row) <= 9 for row in rows)
    kept = lengths if overlong == "split" else lengths.clamp(max=256)
    want = [(document, i) for document, length in enumerate(kept.tolist()) for i in range(length)]
    assert sorted(token for row in got for token in row) == want
    assert rows.tokens == len(want)
    assert rows.efficiency == len(want) / (256 * len(rows))


def test_rows_of_a_small_example():
    rows = pack([5, 2, 0, 3, 1], 6)
    assert list(rows) == [[Piece(0, 0, 5), Piece(4, 0, 1)], [Piece(3, 0, 3), Piece(1, 0, 2)]]
    assert rows[-1] == rows[1]
    assert [[p.document for p in row] for row in pack([5, 2, 0, 3, 1], 6, strategy="first_fit")] == [
        [0, 4],
        [1, 3],
    ]
    assert list(pack([9], 4, overlong="split")) == [[Piece(0, 0, 4)], [Piece(0, 4, 4)], [Piece(0, 8, 1)]]
    assert len(pack([], 4)) == 0
    assert pack([], 4).efficiency == 1.0


@pytest.mark.parametrize("name", LENGTHS)
def test_no_more_rows_than_trl(name):
    """TRL's best fit decreasing on the same lengths, over the whole set and by thousands, its default."""
    pytest.importorskip("trl")
    lengths = LENGTHS[name](20_000)
    ours = len(pack(lengths, CAPACITY))
    assert ours <= trl_row_count(lengths, len(lengths))()
    assert ours <= trl_row_count(lengths, 1000)()


def test_a_million_lengths_in_time(record_property):
    """The bound is 3 s for 10 million (`python -m monograph.bench packing`); CI gets a factor of three."""
    lengths = LENGTHS["log_normal"](1_000_000)
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        pack(lengths, CAPACITY)
        rounds.append(time.perf_counter() - start)
    seconds = min(rounds)
    record_property("seconds", seconds)
    assert seconds < 0.9


def test_misuse_is_named():
    with pytest.raises(ValueError, match="document 1 has length 9, a row has 4 tokens"):
        pack([1, 9], 4)
    with pytest.raises(ValueError, match="document 2 has length -1, wanted 0 or more"):
        pack([1, 2, -1], 4)
    with pytest.raises(ValueError, match="capacity is 0, wanted 1 to 16777216"):
        pack([1], 0)
    with pytest.raises(ValueError, match="max_documents is 0, wanted 1 or more"):
        pack([1], 4, max_documents=0)
    with pytest.raises(
        ValueError, match="strategy is 'ffd', wanted one of 'best_fit_decreasing', 'first_fit'"
    ):
        pack([1], 4, strategy="ffd")
    with pytest.raises(ValueError, match="overlong is 'drop'"):
        pack([1], 4, overlong="drop")
    with pytest.raises(ValueError, match=r"dtype torch.float32 and shape \(2,\)"):
        pack([1.5, 2.0], 4)
    lengths = torch.tensor([3, 9])
    for arguments, message in [
        ((lengths, 4, 0, 0, 2), "document 1 has length 9, a row has 4"),
        ((lengths, 0, 0, 0, 0), "capacity is 0"),
        ((lengths, 4, 0, 2, 0), "strategy is 2"),
        ((lengths, 4, 0, 0, 3), "overlong is 3"),
        ((lengths.int(), 4, 0, 0, 0), "dtype int32, wanted int64"),
        ((torch.ones(4, dtype=torch.int64)[::2], 4, 0, 0, 0), "not contiguous"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ops.pack(*arguments)
    none_open = torch.empty(0, 3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="document 1 has length 9, wanted 1 to 4"):
        ops.pack_stream(lengths, none_open, 0, 4, 0, 1)
    with pytest.raises(RuntimeError, match="open row 3 has space 9"):
        ops.pack_stream(lengths, torch.tensor([[3, 9, 1]]), 4, 4, 0, 1)


def test_opcheck_and_portable():
    lengths = random_lengths(50)
    none_open = torch.empty(0, 3, dtype=torch.int64)
    for overlong in (0, 1):
        opcheck(ops.pack, (lengths, 64, 3, 0, overlong))
        got, want = portable_pack(lengths, 64, 3, 0, overlong), ops.pack(lengths, 64, 3, 0, overlong)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    stream = (lengths.clamp(1, 64), none_open, 0, 64, 3, 4)
    opcheck(ops.pack_stream, stream)
    assert all(
        torch.equal(a, b)
        for a, b in zip(portable_pack_stream(*stream), ops.pack_stream(*stream), strict=True)
    )


@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_a_stream_gives_the_same_rows_whatever_is_read_ahead(overlong):
    documents = [{"input_ids": [0] * n} for n in random_lengths(400).tolist()]
    results = []
    for read_ahead in (1, 7, 1000):
        rows = pack_stream(
            documents, 200, overlong=overlong, max_documents=6, max_open=5, read_ahead=read_ahead
        )
        results.append([[piece for document, piece in row] for row in rows])
    assert results[0] == results[1] == results[2]
    assert all(1 <= len(row) <= 6 and sum(p.length for p in row) <= 200 for row in results[0])
    whole = pack([len(d["input_ids"]) for d in documents], 200, overlong=overlong)
    assert sorted(p for row in results[0] for p in row) == sorted(p for row in whole for p in row)


def test_a_stream_holds_back_only_the_open_rows():
    """An endless stream: rows come while documents still do, at most max_open rows are held back."""
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield {"input_ids": [0] * (1 + taken % 90)}

    rows = pack_stream(endless(), 100, max_open=4, read_ahead=1)
    got = sum(len(next(rows)) for _ in range(50))
    assert taken - got <= 4 * 100
    with pytest.raises(ValueError, match="document 2 has length 5, a row has 4"):
        list(pack_stream([{"input_ids": [0] * n} for n in (1, 2, 5)], 4, read_ahead=1))


def sampler(world_size=1, rank=0, **options):
    options = {"rows_per_step": 12, "seed": 5, "overlong": "truncate", "chunk": 300} | options
    return PackedSampler(random_lengths(1000), 256, rank=rank, world_size=world_size, **options)


@pytest.mark.parametrize("rows_per_batch", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_the_order_is_that_of_one_rank_on_any_number_of_ranks(world_size, rows_per_batch):
    """The batches of all ranks, dealt back in turn, are the rows of each step; 12 rows on 7 ranks too."""
    alone = sampler()
    ranks = [sampler(world_size, rank, rows_per_batch=rows_per_batch) for rank in range(world_size)]
    for step in range(alone.steps(0) + 1):
        dealt = [rank.batches(0, step) for rank in ranks]
        assert {len(batches) for batches in dealt} == {ranks[0].batches_per_step}
        together = [piece for turn in zip(*dealt, strict=True) for batch in turn for piece in batch]
        assert together == [piece for row in alone.rows(0, step) for piece in row]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_resuming_at_any_step_continues_as_if_never_stopped(world_size):
    rank = world_size - 1
    for epoch in (0, 3):
        whole = sampler(world_size, rank)
        whole.set_epoch(epoch)
        batches = list(whole)
        assert len(batches) == len(whole)
        for step in range(0, whole.steps(epoch) + 1, 3):
            resumed = sampler(world_size, rank)
            resumed.load_state_dict(json.loads(json.dumps(whole.state_dict(epoch, step))))
            assert list(resumed) == batches[step * whole.batches_per_step :]
            assert len(resumed) == len(batches) - step * whole.batches_per_step


def test_an_epoch_holds_every_document_once_and_epochs_differ():
    orders = []
    for epoch in range(3):
        pieces = [
            piece
            for step in range(sampler().steps(epoch))
            for row in sampler().rows(epoch, step)
            for piece in row
        ]
        documents = [piece.document for piece in pieces]
        assert sorted(documents) == (random_lengths(1000) > 0).nonzero()[:, 0].tolist()
        orders.append(documents)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert sampler(seed=6).rows(0, 0) != sampler().rows(0, 0)
    in_order = PackedSampler([1, 2, 3, 4], 5, shuffle=False, strategy="first_fit")
    assert [[p.document for p in batch] for batch in in_order] == [[0, 1], [2], [3]]


def shuffled_by_hand(count, *key):
    """SplitMix64's finaliser in Python integers."""
    golden, word = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mixed(x):
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & word
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & word
        return x ^ x >> 31

    stream = 0
    for part in key:
        stream = mixed((stream + (part + 1) * golden) & word)
    words = [mixed((i * golden + stream) & word) for i in range(count)]
    return sorted(range(count), key=lambda i: words[i] - ((words[i] >> 63) << 64))


def test_the_order_is_arithmetic_and_pinned():
    """Not torch's generator, which may change with its version: resumed runs need these very rows."""
    for key in ((0,), (7, 1), (-3, 2, 10**30)):
        assert _shuffled(100, *key).tolist() == shuffled_by_hand(100, *key)
    pinned = PackedSampler(list(range(1, 13)), 12, rows_per_step=3, seed=7, chunk=5)
    assert [[p.document for p in row] for row in pinned.rows(1, 0)] == [[11], [8], [10, 0]]


def test_drop_last_leaves_only_the_short_step_out():
    kept, dropped = sampler(), sampler(drop_last=True)
    rows = sum(len(kept.rows(0, step)) for step in range(kept.steps(0)))
    assert rows % 12 != 0
    assert dropped.steps(0) == kept.steps(0) - 1 == rows // 12
    assert list(dropped) == list(kept)[: len(dropped)]


def test_a_state_of_other_data_is_refused():
    state = sampler().state_dict(0, 3)
    with pytest.raises(ValueError, match="the saved state has seed=5, this sampler 6"):
        sampler(seed=6).load_state_dict(state)
    with pytest.raises(ValueError, match="lengths_sha256"):
        PackedSampler([1, 2], 256, rows_per_step=12, seed=5, overlong="truncate", chunk=300).load_state_dict(
            state
        )
    with pytest.raises(ValueError, match="rank is 2, wanted 0 to 1"):
        sampler(2, 2)
    with pytest.raises(ValueError, match="rows_per_step is 0"):
        sampler(rows_per_step=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_reads_the_pieces(workers):
    lengths = random_lengths(60).tolist()
    dataset = [
        {"input_ids": list(range(n)), "labels": list(range(n)), "id": i} for i, n in enumerate(lengths)
    ]
    batches = PackedSampler(lengths, 64, overlong="split", rows_per_step=2)
    loader = DataLoader(PackedDataset(dataset), batch_sampler=batches, collate_fn=list, num_workers=workers)
    got = [(f["id"], token) for batch in loader for f in batch for token in f["input_ids"]]
    assert sorted(got) == [(i, token) for i, n in enumerate(lengths) for token in range(n)]


def test_cutting_checks_the_lengths_it_was_told():
    document = {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4], "text": "abcd"}
    assert cut(document, Piece(0, 1, 2)) == {"input_ids": [2, 3], "labels": [2, 3], "text": "abcd"}
    with pytest.raises(ValueError, match="document 3 has 4 tokens, wanted at least 6"):
        cut(document, Piece(3, 0, 6))
    with pytest.raises(ValueError, match="has seq_lengths and cannot be cut"):
        cut({**document, "seq_lengths": [2, 2]}, Piece(0, 0, 2))


def test_efficiency_by_hand():
    rows = pack([4, 1, 3, 2], 5)
    efficiency = measure_efficiency(rows, batch_size=2)
    assert efficiency.packed == 1.0
    assert efficiency.first_fit == 1.0
    assert efficiency.padded == 10 / (2 * 4 + 2 * 3)
    assert "71.43%" in str(efficiency)
    assert measure_efficiency(pack([], 5)).padded == 1.0


def test_the_text_picture_shows_documents_and_padding():
    rows = pack([4, 2, 3], 6)
    assert text_picture(rows, width=6).splitlines() == [
        "0 |aaaabb|    2 documents 100.00%",
        "1 |aaa...|    1 documents  50.00%",
    ]
    assert "(3 of 40 rows)" in text_picture(pack([5] * 40, 6), most=3)


def test_the_command_draws_and_prints(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    documents, lengths, picture = tmp_path / "a.jsonl", tmp_path / "b.txt", tmp_path / "grid.png"
    documents.write_text('{"input_ids": [1, 2, 3]}\n\n{"length": 9}\n')
    lengths.write_text("3\n9\n")
    assert main([str(documents), "--capacity", "4"]) == 0
    first = capsys.readouterr().out
    assert "2 documents, 7 tokens in 2 rows of 4; 5 tokens of overlong documents were cut off" in first
    assert main([str(lengths), "--capacity", "4"]) == 0
    assert capsys.readouterr().out == first
    assert main([str(lengths), "--capacity", "4", "--overlong", "split", "--out", str(picture)]) == 0
    assert picture.stat().st_size > 1000
    assert main([str(lengths), "--capacity", "4", "--overlong", "refuse"]) == 3
    assert "document 1 has length 9" in capsys.readouterr().err
    lengths.write_text("3\nx\n")
    assert main([str(lengths)]) == 3
    assert "b.txt:2: 'x' is neither a number nor JSON" in capsys.readouterr().err
    draw_rows(pack([], 4), str(picture))


def test_the_module_has_a_help_with_an_example():
    command = [sys.executable, "-m", "monograph.packing", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "python -m monograph.packing train.jsonl --capacity 4096" in done.stdout
