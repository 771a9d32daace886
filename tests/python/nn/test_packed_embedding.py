"""PackedEmbedding: rows of the decoded table, scaled or not, in any dtype; what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from monograph.nn import PackedEmbedding
from monograph.ops.formats import GGML_FORMATS
from monograph.quant.packed_weight import quantize
from support.ggml_weights import random_weight, shuffled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", GGML_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_the_table(name, dtype):
    packed, dense = random_weight(name, 37, 512)
    table = PackedEmbedding(replace(packed, dtype=dtype))
    every = torch.arange(37)
    assert torch.equal(table(every), dense.to(dtype))
    assert torch.equal(table.weight + 0, dense.to(dtype))
    assert (table.num_embeddings, table.embedding_dim, table.weight.dtype) == (37, 512, dtype)
    for ids in (torch.tensor([[3, 3, 36], [0, 1, 3]]), torch.tensor(5), torch.zeros(2, 0, dtype=torch.long)):
        found = table(ids)
        assert torch.equal(found, nn.functional.embedding(ids, dense.to(dtype)))
        assert not found.requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_is_rounded_to_the_type_of_the_table(dtype):
    """As transformers' scaled embedding multiplies."""
    packed, dense = random_weight("q6_k", 16, 256)
    table = PackedEmbedding(replace(packed, dtype=torch.float32), scale=33.941123).to(dtype)
    ids = torch.randint(0, 16, (4, 7), generator=torch.Generator().manual_seed(0))
    wanted = nn.functional.embedding(ids, dense.to(dtype)) * torch.tensor(33.941123).to(dtype)
    assert torch.equal(table(ids), wanted)


def test_compiled_is_eager_for_any_length():
    packed, _ = random_weight("q4_k", 64, 256)
    table = PackedEmbedding(packed, scale=2.5)
    compiled = torch.compile(table, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (1, 5, 64):
        ids = torch.arange(length)[None]
        assert torch.equal(compiled(ids), table(ids))


def test_an_id_outside_is_an_error():
    table = PackedEmbedding(random_weight("q8_0", 8, 32)[0])
    with pytest.raises((IndexError, RuntimeError)):
        table(torch.tensor([8]))


def test_state_dict_round_trip():
    table, other = (PackedEmbedding(random_weight("q5_k", 8, 256, seed)[0]) for seed in (0, 1))
    assert set(table.state_dict()) == {"values"}
    other.load_state_dict(table.state_dict())
    assert torch.equal(other(torch.arange(8)), table(torch.arange(8)))
    dense = table.dense()
    assert type(dense) is nn.Embedding
    assert torch.equal(dense(torch.arange(8)), table(torch.arange(8)))


def test_what_cannot_be_a_table_is_refused_by_name():
    with pytest.raises(ValueError, match="wanted rows of ggml's blocks"):
        PackedEmbedding(quantize(torch.randn(8, 64), "nf4"))
    with pytest.raises(ValueError, match="wanted rows of ggml's blocks"):
        PackedEmbedding(random_weight("q8_0", 8, 32, row_map=shuffled(8))[0])
    table = PackedEmbedding(random_weight("q8_0", 8, 32)[0])
    with pytest.raises(AttributeError, match="a PackedEmbedding keeps packed bytes"):
        table.weight = nn.Parameter(torch.randn(8, 32))
    with pytest.raises(RuntimeError, match="packed and frozen"):
        table.weight.add_(1)
