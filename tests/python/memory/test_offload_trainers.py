"""Offload by the hooks of autograd: TRL, a compiled function, and whatever autograd can be asked."""

import gc
import os
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import monograph as mg
from support.trl_runs import make_folder, trainer_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"))


def sft(folder, output, spill=None):
    trainer = trainer_for("sft", mg.from_pretrained(folder, dtype=torch.float32), output)
    mg.optimize(trainer.model)
    context = None
    if spill is not None:
        # TRL saves a number of 8 bytes whose backward never runs.
        context = mg.offload_activations(trainer.model, to="disk", folder=spill, min_bytes=64)
    with context or nullcontext():
        trainer.train()
    steps = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e]
    return steps, [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad], context


def test_trl_has_the_same_bits_and_moves_each_storage_once(folder, tmp_path):
    spill = tmp_path / "spill"
    spill.mkdir()
    want, parameters, _ = sft(folder, tmp_path / "plain")
    found, trained, context = sft(folder, tmp_path / "offloaded", spill)
    assert len(want) == 3
    assert found == want
    assert all(torch.equal(a, b) for a, b in zip(trained, parameters, strict=True))
    counts = context.counts()
    assert counts.reads == counts.writes > 3 * 2  # the inputs of two layers in three steps, at least
    assert counts.bytes_read == counts.bytes_written > 0
    assert counts.alive == 0


def seeded(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=dtype).requires_grad_()


def odd_strides(context):
    base = seeded(20, 30, 10).detach()
    x = base.as_strided((7, 9, 11), (3, 101, 307), 13).requires_grad_()
    w = seeded(20, 30, 10)
    with context:
        y = (x.flip(0) * x).sum() + (w * base[:, :1].expand(20, 30, 10)).sum()
        y = y + w.transpose(0, 2)[::3, 1:, 2::2].exp().sum() + w[::2].diagonal().pow(2).sum()
    return [y, *torch.autograd.grad(y, (x, w))]


def nothing_in_it(context):
    x, w = torch.zeros(0, 5, requires_grad=True), seeded(5, 4)
    with context:
        y = (x @ w).exp().sum() + (x * x).sum()
    return [y, *torch.autograd.grad(y, (x, w))]


def a_leaf_saved_twice_and_two_backwards(context):
    x = seeded(33, 33)
    with context:
        y = (x * x * x).sum() + (x @ x.t()).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    return [y, *first, *torch.autograd.grad(y, x)]


def three_derivatives(context):
    x = seeded(9, 9, dtype=torch.float64)
    with context:
        y = x.exp().sigmoid().tanh().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return [y, first, second, *torch.autograd.grad(second.square().sum(), x)]


def conjugates(context):
    x = seeded(8, 8, dtype=torch.complex64)
    with context:
        y = (x.conj() @ x).imag.pow(2).sum() + (x.mH * x.real).abs().sum()
    return [y, *torch.autograd.grad(y, x)]


def reentrant_checkpoints(context):
    torch.manual_seed(5)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)), seeded(4, 16)
    with context:
        y = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True).sum()
    y.backward()
    return [y, x.grad, model[0].weight.grad]


@pytest.mark.parametrize(
    "ask",
    [
        odd_strides,
        nothing_in_it,
        a_leaf_saved_twice_and_two_backwards,
        three_derivatives,
        conjugates,
        reentrant_checkpoints,
    ],
)
def test_the_bits_of_autograd(ask, tmp_path):
    want = [t.detach().clone() for t in ask(nullcontext())]
    context = mg.offload_activations(folder=tmp_path, min_bytes=0)
    found = [t.detach().clone() for t in ask(context)]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    gc.collect()
    assert context.counts().writes > 0
    assert context.counts().alive == 0


def test_an_exception_inside_two_contexts_leaves_nothing_on(tmp_path):
    context = mg.offload_activations(folder=tmp_path, min_bytes=0)

    def fails():
        with context:
            y = seeded(10).exp()
            with context:
                y.exp()
                raise KeyError

    with pytest.raises(KeyError):
        fails()
    gc.collect()
    assert (context.counts().writes, context.counts().alive) == (2, 0)
    seeded(10).exp()
    assert context.counts().writes == 2


def test_a_compiled_function_is_not_compiled_again(tmp_path):
    torch._dynamo.reset()
    counters.clear()
    f = torch.compile(lambda x: (x.sin() @ x).cos().sum(), backend="aot_eager", fullgraph=True)
    x = seeded(20, 20)
    (want,) = torch.autograd.grad(f(x), x)
    context = mg.offload_activations(folder=tmp_path, min_bytes=0)
    with context:
        y = f(x)
    assert torch.equal(torch.autograd.grad(y, x)[0], want)
    assert context.counts().writes == context.counts().reads > 0
    assert counters["stats"]["unique_graphs"] == 1


def test_backward_in_another_thread(tmp_path):
    context, x = mg.offload_activations(folder=tmp_path, min_bytes=0), seeded(64, 64)
    (want,) = torch.autograd.grad((x @ x).sin().sum(), x)
    with context:
        y = (x @ x).sin().sum()
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.autograd.grad(y, x)[0]))
    thread.start()
    thread.join()
    assert torch.equal(found[0], want)


def test_a_forked_child_may_not_write_and_removes_nothing(tmp_path):
    context = mg.offload_activations(folder=tmp_path, min_bytes=0)
    with context:
        y = seeded(100).exp().sum()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with context:
                seeded(100).exp()
        except RuntimeError as error:
            code = 0 if "is a copy; it may not write" in str(error) else 2
        del context
        gc.collect()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(tmp_path.iterdir())) == 1
    y.backward()
