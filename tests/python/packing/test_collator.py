"""The collators: what a batch holds, that a model gives what the documents alone give, misuse."""

import math

import pytest
import torch
import torch._dynamo
from torch.utils.data import DataLoader

import monograph as mg  # noqa: F401  (loads the operators)
from monograph.packing import (
    PackedCollator,
    PackedDataset,
    PackedSampler,
    PaddedCollator,
    total_target_tokens,
)
from support.tiny_models import tiny_llama

FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def documents(*lengths, vocabulary=97, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(1, vocabulary, (n,), generator=generator).tolist()} for n in lengths]


def test_a_batch_by_hand():
    collate = PackedCollator(pad_to_multiple_of=4, max_documents=4, pad_token_id=9)
    batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": [], "labels": []}, {"input_ids": [4, 5]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 5, 5]  # padding is in no document
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 5, 5, 8]  # flash kernels must write every row
    assert torch.equal(batch["cu_seq_lens_q"], batch["cu_seq_lens_k"])
    assert batch["cu_seqlens"].dtype == batch["cu_seq_lens_q"].dtype == torch.int32
    assert (batch["max_length_q"], batch["max_length_k"]) == (8, 8)
    assert batch["num_items_in_batch"].item() == 3
    assert all(batch[name].dtype == torch.int64 for name in ("input_ids", "labels", "position_ids"))
    assert not {*FLASH, "use_cache"} & PackedCollator(transformers_keywords=False)(documents(3)).keys()


def test_without_options_nothing_is_padded():
    batch = PackedCollator()(documents(3, 1, 5))
    assert batch["input_ids"].shape == (1, 9)
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 9]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 4, 9, 9]
    assert type(batch["max_length_q"]) is int
    assert batch["max_length_q"] == 5
    assert batch["num_items_in_batch"].item() == 2 + 0 + 4


def test_shapes_and_integers_are_the_same_for_every_packing():
    """What a compiled model sees: only values of tensors change from batch to batch."""
    collate = PackedCollator(pad_to_multiple_of=64, max_documents=12)
    seen = set()
    for lengths in ([64], [1] * 12, [30, 20], [], [63], [5, 6, 7, 8]):
        batch = collate(documents(*lengths))
        seen.add(str({k: (v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}))
    assert len(seen) == 1


def test_an_empty_batch_is_a_row_of_padding_without_targets():
    batch = PackedCollator(pad_to_multiple_of=8, max_documents=2)([])
    assert batch["input_ids"].tolist() == [[0] * 8]
    assert batch["cu_seqlens"].tolist() == [0, 0, 0]
    assert batch["num_items_in_batch"].item() == 0


def test_labels_that_are_given_are_kept():
    feature = {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 30, 40]}
    first_is_target = {"input_ids": [5, 6], "labels": [50, 60]}
    batch = PackedCollator()([feature, first_is_target])
    assert batch["labels"].tolist() == [[-100, -100, 30, 40, -100, 60]]
    assert batch["num_items_in_batch"].item() == 3
    assert first_is_target["labels"] == [50, 60]
    tensors = {"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([50, 60])}
    PackedCollator()([tensors])
    assert tensors["labels"].tolist() == [50, 60]
    masked = {"input_ids": [1, 2, 3, 4], "completion_mask": [0, 0, 1, 1], "assistant_masks": [1, 1, 1, 0]}
    assert PackedCollator()([masked])["labels"].tolist() == [[-100, -100, 3, -100]]


@pytest.mark.parametrize("column", ["seq_lengths", "position_ids"])
def test_packed_rows_are_flattened_with_their_boundaries(column):
    """A batch of several packed rows is one longer row with the documents of all of them."""
    apart = documents(3, 5, 2, 4)
    rows = []
    for pair in (apart[:2], apart[2:]):
        ids = [d["input_ids"] for d in pair]
        given = [len(i) for i in ids] if column == "seq_lengths" else [p for i in ids for p in range(len(i))]
        rows.append({"input_ids": [token for i in ids for token in i], column: given})
    got, want = PackedCollator()(rows), PackedCollator()(apart)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(torch.as_tensor(got[name]), torch.as_tensor(value)), name


def test_misuse_is_visible():
    """Nothing is swallowed; a failure is a ValueError that names feature and finding."""
    collate = PackedCollator(max_documents=2)
    for features, message in [
        (documents(1, 1, 1), "the batch has 3 documents, cu_seqlens has room for max_documents=2"),
        ([{"labels": [1]}], "feature 0: no input_ids, only labels"),
        ([{"input_ids": torch.ones(2, 4, dtype=torch.int64)}], r"feature 0: input_ids has shape \(2, 4\)"),
        ([{"input_ids": [1.5, 2.0]}], "feature 0: input_ids has dtype torch.float32, wanted integers"),
        (
            [*documents(2), {"input_ids": [1, 2], "labels": [1]}],
            "feature 1: labels has 1 entries, input_ids 2",
        ),
        ([{"input_ids": [1, 2], "seq_lengths": [1, 2]}], "feature 0: seq_lengths sum to 3, input_ids has 2"),
        (
            [{"input_ids": [1, 2, 3], "position_ids": [0, 2, 3]}],
            "feature 0: position_ids do not count from 0",
        ),
        (
            [{"input_ids": [1, 2, 3], "position_ids": [4, 5, 6]}],
            "feature 0: position_ids do not count from 0",
        ),
        ([{"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}], "feature 0: attention_mask has zeros"),
        ([{"input_ids": [1, 2], "token_type_ids": [0, 1]}], "feature 0: column 'token_type_ids' is not one"),
        (
            [{"input_ids": [1, 2], "pixel_values": torch.ones(3)}],
            "feature 0: column 'pixel_values' is not one",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            collate(features)
    for options in ({"pad_to_multiple_of": 0}, {"max_documents": 0}):
        with pytest.raises(ValueError, match="is 0, wanted 1 or more"):
            PackedCollator(**options)
    harmless = {
        "input_ids": [1, 2],
        "attention_mask": [1, 1],
        "text": "ab",
        "messages": [{}, {}],
        "length": 2,
    }
    assert collate([harmless])["input_ids"].tolist() == [[1, 2]]


def test_padded_batches_and_packed_rows_are_not_mixed():
    batch = PaddedCollator(pad_to_multiple_of=4, pad_token_id=9)(documents(3, 5))
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].sum(dim=1).tolist() == [3, 5]
    assert (batch["labels"] != -100).sum(dim=1).tolist() == [2, 4]
    assert (batch["input_ids"] == 9)[0, 3:].all()
    assert batch["num_items_in_batch"].item() == 6
    for row in ({"seq_lengths": [1, 2]}, {"position_ids": [0, 0, 1]}):
        with pytest.raises(ValueError, match="feature 0 has 2 documents, wanted 1"):
            PaddedCollator()([{"input_ids": [1, 2, 3], **row}])
    with pytest.raises(ValueError, match="no documents"):
        PaddedCollator()([])


def test_targets_are_counted_over_micro_batches():
    collate = PackedCollator(pad_to_multiple_of=16)
    batches = [collate(documents(*lengths)) for lengths in ([5, 7], [], [1, 1, 9])]
    assert total_target_tokens(batches).item() == 4 + 6 + 0 + 8
    assert total_target_tokens([]).item() == 0


def count_on_two_ranks(rank, store):
    """Runs in a process of its own; the sampler asks torch.distributed which rank it is."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    lengths = [7, 1, 12, 30, 9, 22, 3, 17]
    sampler = PackedSampler(lengths, 32, rows_per_step=4)
    assert (sampler.rank, sampler.world_size) == (rank, 2)
    collate = PackedCollator(pad_to_multiple_of=32)
    mine = list(DataLoader(PackedDataset(documents(*lengths)), batch_sampler=sampler, collate_fn=collate))
    assert len(mine) == 2
    assert total_target_tokens(mine).item() == sum(lengths) - len(lengths)
    torch.distributed.destroy_process_group()


def test_targets_are_counted_over_ranks(tmp_path):
    torch.multiprocessing.spawn(count_on_two_ranks, (str(tmp_path / "store"),), nprocs=2)


def double_llama(**options):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 97}
    return tiny_llama(dtype=torch.float64, attn_implementation="sdpa", **sizes, **options)


def loss_of_documents(model, features):
    """Each document alone: sum of the losses of its targets, and their number."""
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for feature in features:
        ids = torch.tensor([feature["input_ids"]])
        logits = model(input_ids=ids).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        targets += ids.numel() - 1
    return total, targets


def loss_of_batch(model, batch, targets):
    """transformers computes its own loss in float32; this is float64."""
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    return (
        torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum") / targets
    )


@pytest.mark.parametrize("train", [True, False])
def test_packed_and_padded_loss_is_that_of_the_documents_alone(train):
    """Boundaries come with the batch, for any model, in evaluation as in training.

    float64: the sums differ in their order only, 60 terms of about 4.6: 1e-12 allows some 1000 roundings of
    2^-53. transformers' loss is a float32 sum of 54 terms: (54 + 10) * 2^-24 = 4e-6.
    """
    model = double_llama().train(train)
    features = documents(7, 1, 12, 30, 9)
    total, targets = loss_of_documents(model, features)
    want = (total / targets).item()
    for collate in (
        PackedCollator(pad_to_multiple_of=64, max_documents=6),
        PackedCollator(),
        PaddedCollator(),
    ):
        batch = collate(features)
        assert batch["num_items_in_batch"].item() == targets
        assert math.isclose(loss_of_batch(model, batch, targets).item(), want, rel_tol=1e-12), collate
        assert math.isclose(model(**batch).loss.item(), want, rel_tol=4e-6), collate


def test_a_cache_would_let_documents_see_each_other():
    """Why the batch says use_cache=False: with transformers' default the loss of a packed row is another."""
    model = double_llama()
    features = documents(7, 12, 30)
    total, targets = loss_of_documents(model, features)
    batch = PackedCollator()(features)
    assert batch["use_cache"] is False
    leaking = loss_of_batch(model, {**batch, "use_cache": None}, targets)
    assert abs(leaking.item() - (total / targets).item()) > 1e-4


def test_gradients_over_micro_batches_and_ranks_are_those_of_one_batch():
    """Three ranks, four rows, so some batches are empty: summed gradients equal those of all documents."""
    model = double_llama()
    lengths = [7, 1, 12, 30, 9, 22, 3, 17]
    features = documents(*lengths)
    total, targets = loss_of_documents(model, features)
    want = torch.autograd.grad(total / targets, list(model.parameters()))
    collate = PackedCollator(pad_to_multiple_of=32, max_documents=8)
    batches = []
    for rank in range(3):
        sampler = PackedSampler(lengths, 32, rows_per_step=4, rank=rank, world_size=3)
        assert sampler.steps(0) == 1
        batches += DataLoader(PackedDataset(features), batch_sampler=sampler, collate_fn=collate)
    assert len(batches) == 6
    assert sum(batch["num_items_in_batch"].item() == 0 for batch in batches) == 2
    count = total_target_tokens(batches)
    assert count.item() == targets
    losses = [loss_of_batch(model, batch, count) for batch in batches]
    got = torch.autograd.grad(sum(losses), list(model.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    # An empty batch has a loss of 0, not NaN, if it is divided by the global number.
    assert [model(**{**b, "num_items_in_batch": count}).loss.item() == 0 for b in batches].count(True) == 2


def varlen_by_mask(q, k, v, cu_seqlens_q, cu_seqlens_k, **kwargs):
    """What flash attention's varlen call computes, by a dense mask; q, k, v are [tokens, heads, size]."""
    assert "max_seqlen_q" in kwargs
    position = torch.arange(q.shape[0])
    document = torch.searchsorted(cu_seqlens_q[1:], position, right=True)
    mask = (document[:, None] == document[None, :]) & (position[:, None] >= position[None, :])
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=True
    ).transpose(0, 1)


@pytest.fixture
def flash_stand_in(monkeypatch):
    """transformers' flash path with its kernels replaced: they do not exist for a CPU."""
    flash = pytest.importorskip("transformers.modeling_flash_attention_utils")

    def unused(*arguments, **keywords):
        raise AssertionError("transformers should not need this")

    keywords = lambda **all_keywords: {k: v for k, v in all_keywords.items() if k.startswith("max_seqlen")}  # noqa: E731
    functions = ((unused, varlen_by_mask, unused, unused, unused), (keywords, unused))
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda implementation: functions)
    return flash


def flash_forward(flash, batch, with_keywords):
    names = FLASH if with_keywords else ()

    def forward(q, position_ids, keywords):
        return flash._flash_attention_forward(
            q, q, q, None, query_length=q.shape[1], is_causal=True, position_ids=position_ids, **keywords
        )

    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, batch["input_ids"].shape[1], 2, 8, generator=generator)
    return forward, (q, batch["position_ids"], {name: batch[name] for name in names})


def test_transformers_skips_its_own_derivation(flash_stand_in, monkeypatch):
    """Given our keywords, `_is_packed_sequence` and the like are not called; same result."""
    batch = PackedCollator(pad_to_multiple_of=32, max_documents=5)(documents(7, 1, 12))
    forward, arguments = flash_forward(flash_stand_in, batch, with_keywords=False)
    want = forward(*arguments)
    for name in ("_is_packed_sequence", "_prepare_from_posids", "prepare_fa_kwargs_from_position_ids"):
        monkeypatch.setattr(flash_stand_in, name, lambda *a, name=name: pytest.fail(f"{name} was called"))
    forward, arguments = flash_forward(flash_stand_in, batch, with_keywords=True)
    torch.testing.assert_close(forward(*arguments), want)


def test_the_keywords_make_the_flash_path_one_graph(flash_stand_in):
    """With them fullgraph over eight packings without a recompile; without them it breaks."""
    collate = PackedCollator(pad_to_multiple_of=64, max_documents=12)
    torch._dynamo.reset()
    compiled = None
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(8):
            batch = collate(documents(*torch.randint(1, 9, (4 + seed,)).tolist()))
            forward, arguments = flash_forward(flash_stand_in, batch, with_keywords=True)
            compiled = compiled or torch.compile(forward, fullgraph=True, backend="eager")
            torch.testing.assert_close(compiled(*arguments), forward(*arguments))
    torch._dynamo.reset()
    forward, arguments = flash_forward(flash_stand_in, batch, with_keywords=False)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(forward, fullgraph=True, backend="eager")(*arguments)


def test_trl_packed_rows_collate_as_their_documents():
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    features = documents(7, 3, 12, 5, 9, 2)
    packed = trl.pack_dataset(datasets.Dataset.from_list(features), 16, strategy="bfd")
    batch = PackedCollator()(list(packed))
    rows = [row["seq_lengths"] for row in packed]
    assert batch["cu_seqlens"].diff().tolist() == [length for row in rows for length in row]
    assert batch["num_items_in_batch"].item() == sum(len(f["input_ids"]) - 1 for f in features)
