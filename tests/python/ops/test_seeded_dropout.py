"""monograph::seeded_dropout: the mask is a function of seed and stream, and has the right share of zeros."""

import pytest
import torch
from torch import nn

from monograph.ops.seeded_dropout import (
    SeededDropout,
    hashed_dropout,
    seed_dropouts,
    seeded_dropout,
    seeded_dropout_part,
)

pytestmark = pytest.mark.per_isa


def philox(counter, key):
    """Philox4x32-10 by whole numbers (Salmon, Moraes, Dror and Shaw, 2011)."""
    c, low, high = [counter % 2**32, counter >> 32, 0, 0], key % 2**32, key >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ low, second % 2**32, (first >> 32) ^ c[3] ^ high, first % 2**32]
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return c


def test_the_words_of_philox():
    """Those that a GPU draws for this seed and stream."""
    seed, stream = -(2**60) + 12345, 9
    key = (seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03) % 2**64
    words = [word for counter in range(50) for word in philox(counter, key)]
    for probability in (0.1, 0.5, 0.9):
        y = seeded_dropout(torch.ones(199), torch.tensor(seed), stream, probability)
        assert (y != 0).tolist() == [word < (1 - probability) * 2**32 for word in words[:199]]


def test_float64_has_the_mask_of_float32():
    x = torch.randn(300, dtype=torch.float64, requires_grad=True)
    y = seeded_dropout(x, torch.tensor(5), 1, 0.25)
    other = seeded_dropout(torch.ones(300), torch.tensor(5), 1, 0.25)
    assert y.dtype == torch.float64
    assert torch.equal(y, torch.where(other != 0, x / 0.75, 0.0))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx != 0, other != 0)


def test_what_is_not_finite_stays_seen():
    y = seeded_dropout(torch.full((1000,), float("inf")), torch.tensor(1), 0, 0.5)
    assert 400 < y.isnan().sum() < 600
    assert torch.all(y.isnan() | (y == float("inf")))


def test_mask_scale_and_share():
    x = torch.ones(400, 500)
    y = seeded_dropout(x, torch.tensor(7), 3, 0.2)
    assert set(y.unique().tolist()) == {0.0, 1.25}
    # 200,000 draws: five standard deviations are 0.0045.
    assert abs((y == 0).float().mean() - 0.2) < 0.0045
    assert torch.equal(y, seeded_dropout(x, torch.tensor(7), 3, 0.2))
    for seed, stream in ((8, 3), (7, 4)):
        other = seeded_dropout(x, torch.tensor(seed), stream, 0.2)
        both = ((y == 0) & (other == 0)).float().mean()
        assert abs(both - 0.04) < 0.0025, "masks of different seeds or streams are not independent"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_has_the_mask(dtype):
    x = torch.randn(64, 64, dtype=dtype, requires_grad=True)
    y = seeded_dropout(x, torch.tensor(1), 0, 0.5)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx == 0, y == 0)
    assert torch.equal(dx[dx != 0], torch.full_like(dx[dx != 0], 2.0))


def test_opcheck_and_dynamic_lengths():
    sample = (torch.randn(5, 8, requires_grad=True), torch.tensor(3), 1, 0.5)
    torch.library.opcheck(torch.ops.monograph.seeded_dropout.default, sample)
    torch._dynamo.reset()
    compiled = torch.compile(seeded_dropout, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, length in enumerate((4, 9, 17)):
        x, seed = torch.randn(length, 8), torch.tensor(number)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            assert torch.equal(compiled(x, seed, 1, 0.5), seeded_dropout(x, seed, 1, 0.5))


def test_every_dropout_of_a_model_gets_its_own_stream():
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0)), nn.ReLU())
    seed = seed_dropouts(model)
    replaced = [m for m in model.modules() if isinstance(m, SeededDropout)]
    assert len({m.stream for m in replaced}) == len(replaced) == 2
    assert all(m.seed is seed for m in replaced)
    assert seed_dropouts(model) is seed, "a second call finds the first one's seed"
    x = torch.ones(1000)
    first = model(x)
    assert torch.equal(model(x), first)
    seed.fill_(1)
    assert not torch.equal(model(x), first)
    model.eval()
    assert torch.equal(model(x), x)


def test_a_mask_follows_from_places_not_from_memory():
    seed = torch.tensor(3)
    x = torch.randn(40, 30).t().requires_grad_()
    y = seeded_dropout(x, seed, 0, 0.5)
    assert torch.equal(y, seeded_dropout(x.detach().contiguous(), seed, 0, 0.5))
    ones = torch.ones(40, 30).t()
    (gradient,) = torch.autograd.grad(y, x, ones)
    assert torch.equal(gradient, seeded_dropout(ones.contiguous(), seed, 0, 0.5))


def test_a_seed_without_a_value_is_refused():
    with pytest.raises(ValueError, match="seed is on meta, wanted cpu"):
        seeded_dropout(torch.ones(4), torch.tensor(3, device="meta"), 0, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_that_are_told_their_place_have_the_mask_of_the_whole(dtype):
    x, seed = torch.randn(7, 13).to(dtype), torch.tensor(11)
    whole = seeded_dropout(x, seed, 2, 0.5).flatten()
    for cut in (1, 2, 3, 4, 5, 64, 90):
        parts = [
            seeded_dropout_part(part.requires_grad_(), seed, 2, 0.5, first)
            for part, first in ((x.flatten()[:cut].clone(), 0), (x.flatten()[cut:].clone(), cut))
        ]
        assert torch.equal(torch.cat(parts), whole)
        for part, first in zip(parts, (0, cut), strict=True):
            (gradient,) = torch.autograd.grad(
                part, part.grad_fn.next_functions[0][0].variable, torch.ones_like(part)
            )
            assert torch.equal(gradient, seeded_dropout_part(torch.ones_like(part), seed, 2, 0.5, first))
    with pytest.raises(RuntimeError, match="first is -1, wanted 0 or more"):
        seeded_dropout_part(x, seed, 2, 0.5, -1)


def test_opcheck_of_a_part():
    sample = (torch.randn(5, 8, requires_grad=True), torch.tensor(3), 1, 0.5, 40)
    torch.library.opcheck(torch.ops.monograph.seeded_dropout_part.default, sample)
    x, seed = torch.randn(3, 50), torch.tensor(9)
    whole = hashed_dropout(x, seed, 1, 0.3)
    assert torch.equal(hashed_dropout(x[1:], seed, 1, 0.3, first=50), whole[1:])
