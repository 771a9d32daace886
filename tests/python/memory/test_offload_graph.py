"""Offload as nodes of a graph: one graph, no recompile, the bits of the step without it."""

import gc

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.library import opcheck

from monograph.memory.offload.graph import OffloadingPartitioner, offload_saved
from monograph.memory.offload.spill import Spill
from monograph.training import TrainStep
from support.step_models import batches, build

ops = torch.ops.monograph


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def spill(tmp_path):
    made = Spill(tmp_path)
    yield made
    made.close()


def test_the_operators_give_back_what_they_took(spill):
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64):
        x = torch.randint(0, 2, (3, 5, 7)).to(dtype)
        handle = ops.offload(x, spill.file, 0)
        begun = ops.reload(handle, x)
        del handle  # what was begun keeps the bytes
        found = ops.wait(begun, x, [3, 5, 7], dtype)
        assert found.dtype == dtype
        assert torch.equal(found, x)
        del begun
        assert spill.counts().alive == 0


def test_opcheck(spill):
    x = torch.randn(4, 6)
    # Two calls give two tickets: values are compared by what comes back, not here.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(ops.offload.default, (x, spill.file, 0), test_utils=utilities)
    handle = ops.offload(x, spill.file, 0)
    opcheck(ops.reload.default, (handle, x), test_utils=utilities)
    opcheck(ops.wait.default, (handle, x, [4, 6], torch.float32))


def test_misuse(spill):
    x = torch.randn(4, 6)
    handle = ops.offload(x, spill.file, 0)
    with pytest.raises(RuntimeError, match="92 bytes wanted of an extent of 96"):
        ops.wait(handle, x, [23], torch.float32)
    copy = handle.clone()
    assert torch.equal(ops.wait(copy, x, [4, 6], torch.float32), x)  # while the handle lives
    del handle
    with pytest.raises(RuntimeError, match="its offload is over, or it is a copy"):
        ops.wait(copy, x, [4, 6], torch.float32)
    with pytest.raises(RuntimeError, match="not one of monograph::offload"):
        ops.reload(x, x)
    with pytest.raises(RuntimeError, match="spill file 9999 is not open"):
        ops.offload(x, 9999, 0)
    with pytest.raises(RuntimeError, match="x is not contiguous"):
        ops.offload(x.t(), spill.file, 0)
    spill.close()
    with pytest.raises(RuntimeError, match="is not open"):
        ops.offload(x, spill.file, 0)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.second((self.first(x) * 2).sin()).square().sum()


def losses_and_gradients(model, f, x):
    model.zero_grad()
    loss = f(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_inductor_gives_the_bits_of_inductor(spill):
    torch.manual_seed(0)
    model = TwoLayers()
    plain = torch.compile(model, fullgraph=True)
    torch.manual_seed(1)
    inputs = [torch.randn(64, 32), torch.randn(48, 32), torch.randn(80, 32)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    want = [losses_and_gradients(model, plain, x) for x in inputs]
    torch._dynamo.reset()
    counters.clear()
    options = {"custom_partitioner_fn": OffloadingPartitioner(min_bytes=0)}
    offloaded = torch.compile(model, fullgraph=True, options=options)
    found = [losses_and_gradients(model, offloaded, x) for x in inputs]
    for a, b in zip(found, want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    counts = spill.counts()
    assert counts.writes == counts.reads > 0
    assert counts.bytes_written == counts.bytes_read
    assert counts.writes % len(inputs) == 0
    assert counts.alive == 0
    assert counters["stats"]["unique_graphs"] == 1


def test_two_offloads_of_one_input_are_not_merged(spill):
    def twice(x):
        one, other = ops.offload(x, 0, 0), ops.offload(x, 0, 1)
        a = ops.wait(ops.reload(one, x), x, x.shape, x.dtype)
        b = ops.wait(ops.reload(other, x), x, x.shape, x.dtype)
        return a + b

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(ops.offload(x, 0, 0), ops.offload(x, 0, 1))
            return x.sin()

        @staticmethod
        def backward(ctx, dy):
            one, other = ctx.saved_tensors
            a = ops.wait(ops.reload(one, dy), dy, dy.shape, dy.dtype)
            b = ops.wait(ops.reload(other, dy), dy, dy.shape, dy.dtype)
            return dy * (a.cos() + b.cos()) / 2

    x = torch.randn(64, 32, requires_grad=True)
    y = torch.compile(Twice.apply, fullgraph=True, backend="inductor")(x).sum()
    assert spill.counts().writes == 2
    y.backward()
    assert spill.counts().reads == 2
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert torch.equal(torch.compile(twice, fullgraph=True, backend="aot_eager")(x.detach()), 2 * x.detach())
    assert spill.counts().writes == 4


STEPS = 3


def run(mode, tmp_path=None, steps=STEPS, checkpointing=True):
    torch._dynamo.reset()
    counters.clear()
    model = build("qwen3", checkpointing, format="nf4")
    given = {}
    if tmp_path is not None:
        given = {"offload": "disk", "offload_folder": str(tmp_path), "offload_min_bytes": 0}
    step = TrainStep(model, mode=mode, **given)
    results = [step([batch], 1e-3) for batch in batches(packed=False, count=steps)]
    bits = [(r.loss.clone(), r.grad_norm.clone()) for r in results]
    return bits, step.state.flat.clone(), step


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_checkpointed_step_has_the_same_bits_and_one_graph(mode, tmp_path):
    want, parameters, _ = run(mode)
    found, trained, step = run(mode, tmp_path)
    for (a, norm_a), (b, norm_b) in zip(found, want, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(norm_a, norm_b)
    assert torch.equal(trained, parameters)
    counts = step.offload.counts()
    layers = step.model.config.num_hidden_layers
    assert counts.writes == counts.reads >= layers * STEPS
    assert counts.bytes_written == counts.bytes_read > 0
    assert counts.alive == 0
    if mode == "graph":
        assert counters["stats"]["unique_graphs"] == 1
    del step
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_checkpointed_step_as_inductors_graph(tmp_path):
    want, parameters, _ = run("inductor", steps=2)
    found, trained, step = run("inductor", tmp_path, steps=2)
    assert all(torch.equal(a, b) for x, y in zip(found, want, strict=True) for a, b in zip(x, y, strict=True))
    assert torch.equal(trained, parameters)
    counts = step.offload.counts()
    assert counts.writes == counts.reads >= 2 * step.model.config.num_hidden_layers
    assert counters["stats"]["unique_graphs"] == 1


def test_a_whole_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="offload is 'disk' and mode 'whole_step', wanted one of graph"):
        TrainStep(build("llama", True), mode="whole_step", offload="disk", offload_folder=str(tmp_path))
    with pytest.raises(ValueError, match="on the host \\(cpu\\) already"):
        TrainStep(build("llama", True), mode="graph", offload="host")


def test_what_is_handed_over_but_not_ours_stays(spill):
    """Inputs, views of them and results for the caller are not offloaded; turned tensors come back turned."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def partition(joint, inputs, *, num_fwd_outputs, **options):
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        seen.append(offload_saved(forward, backward, num_fwd_outputs, 0))
        seen.append(forward)
        return forward, backward

    compiler = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    weight = torch.randn(16, 16, requires_grad=True)

    def f(x):
        y = (x.t() @ weight).t()  # turned
        z = torch.ops.monograph.rms_norm(y.contiguous(), None, None, 1e-6, False, False)[0]
        return (z @ y.t()).sum(), z

    x = torch.randn(16, 8, requires_grad=True)
    want = f(x)[0]
    want.backward()
    gradients = [x.grad.clone(), weight.grad.clone()]
    x.grad = weight.grad = None
    found = torch.compile(f, backend=backend, fullgraph=True)(x)[0]
    found.backward()
    assert torch.equal(found, want)
    torch.testing.assert_close([x.grad, weight.grad], gradients)
    assert spill.counts().writes == spill.counts().reads == seen[0] > 0
    assert spill.counts().alive == 0
    targets = [node.target for node in seen[1].graph.nodes]
    assert targets.count(ops.offload.default) == seen[0]
    results = [node for node in seen[1].graph.find_nodes(op="output")[0].args[0]]
    leaving = {node.args[0] for node in seen[1].graph.nodes if node.target is ops.offload.default}
    assert not leaving & set(results)
    assert all(node.op == "call_function" for node in leaving)
