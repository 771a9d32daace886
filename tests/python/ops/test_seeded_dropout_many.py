"""monograph::seeded_dropout_many: the bits of seeded_dropout on its rows, nothing on those of others."""

import pytest
import torch

from monograph.ops.seeded_dropout import seeded_dropout
from monograph.ops.seeded_dropout_many import MOST_STREAMS, seeded_dropout_many

STARTS = torch.tensor([0, 3, 3, 8, 12])
SEEDS = torch.tensor([5, 6, 7, 2**62])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_gets_the_mask_that_it_gets_alone_and_others_the_neutral_zero(dtype):
    x = torch.randn(1, 12, 33).to(dtype).requires_grad_()
    y = seeded_dropout_many(
        x, STARTS, SEEDS, [3, 1, 0], [3 * MOST_STREAMS + 4, MOST_STREAMS, 9], [0.5, 0.5, 0.1]
    )
    for rows, seed, stream, p in ((slice(8, 12), 2**62, 4, 0.5), (slice(0, 3), 5, 9, 0.1)):
        assert torch.equal(y[:, rows], seeded_dropout(x[:, rows].contiguous(), torch.tensor(seed), stream, p))
    rest = y[:, 3:8]
    assert bool((rest == 0).all())
    assert bool(torch.signbit(rest).all())  # x + -0.0 is x, also where x is -0.0
    dy = torch.randn(1, 12, 33).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx[:, :3], seeded_dropout(dy[:, :3].contiguous(), torch.tensor(5), 9, 0.1))
    assert bool(torch.signbit(dx[:, 3:8]).all())


def test_what_is_not_finite_stays_in_its_rows():
    x = torch.randn(12, 4)
    x[:3] = float("nan")
    y = seeded_dropout_many(x, STARTS, SEEDS, [0, 2], [0, 0], [0.5, 0.5])
    assert bool(y[3:].isfinite().all())


def test_opcheck_and_other_ranges_are_the_same_graph():
    x = torch.randn(12, 5, requires_grad=True)
    torch.library.opcheck(
        torch.ops.monograph.seeded_dropout_many.default, (x, STARTS, SEEDS, [2, 0], [1, 2], [0.5, 0.1])
    )
    compiled = torch.compile(seeded_dropout_many, fullgraph=True, dynamic=True, backend="aot_eager")
    seen = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ends in ([3, 3, 8], [0, 0, 0], [2, 7, 9]):
            starts = torch.tensor([0, *ends, 12])
            given = (x.detach(), starts, SEEDS, [2, 0], [1, 2], [0.5, 0.1])
            seen.append(compiled(*given))
            assert torch.equal(seen[-1], seeded_dropout_many(*given))
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": torch.tensor([0, 3, 3, 8, 11])}, "starts is .*, wanted ascending numbers from 0 to 12"),
        ({"seeds": SEEDS.int()}, r"seeds is int32 \[4\] on cpu, wanted int64 \[adapters\]"),
        ({"which": [4]}, r"adapters are \[4\], wanted different ones of 0 to 3"),
        ({"which": [1, 1], "streams": [0, 0], "probabilities": [0.5, 0.5]}, "wanted different ones"),
        ({"streams": []}, "wanted as many of each"),
        ({"probabilities": [1.5]}, "probability is 1.5, wanted 0 to 1"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = {"starts": STARTS, "seeds": SEEDS, "which": [2], "streams": [1], "probabilities": [0.5]} | change
    with pytest.raises((RuntimeError, ValueError), match=message):
        seeded_dropout_many(torch.randn(12, 4), **given)
