"""gated_delta_rule and causal_conv1d by flash-linear-attention: what it is given and what becomes of its
results, by a stand-in with its functions; its own arguments and kernels where it is installed."""

import ast
import importlib.util
import inspect
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

from monograph.ops import causal_conv1d_fla, gated_delta_rule_fla, providers
from monograph.ops.causal_conv1d import causal_conv1d
from monograph.ops.gated_delta_rule import gated_delta_rule
from support import fla_stand_in

ops = torch.ops.monograph
TOKENS, KEY_HEADS, HEADS, KEY, VALUE, CHANNELS, TAPS = 150, 1, 2, 16, 24, 10, 4
PACKINGS = {
    "one": [0, 150],
    "three": [0, 70, 71, 150],
    "rows outside": [3, 90, 140],
    "empty ones": [0, 0, 80, 80, 150, 150],
    "none inside": [20, 20],
}


@pytest.fixture
def fla(monkeypatch):
    calls = fla_stand_in.install(monkeypatch, "cpu")
    with providers.using({"gated_delta_rule": "fla", "causal_conv1d": "fla"}):
        yield calls
    providers._looked_up.cache_clear()


def rule_inputs(dtype, cu, state, tokens=TOKENS):
    torch.manual_seed(0)
    made = [
        torch.randn(tokens, h, d).to(dtype) for h, d in ((KEY_HEADS, KEY), (KEY_HEADS, KEY), (HEADS, VALUE))
    ]
    g, beta = -torch.rand(tokens, HEADS).to(dtype), torch.rand(tokens, HEADS).to(dtype)
    start = torch.randn(len(cu) - 1, HEADS, KEY, VALUE) if state else None
    return [*made, g, beta], torch.tensor(cu, dtype=torch.int32), start


def conv_inputs(dtype, cu, state, tokens=TOKENS):
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, CHANNELS).to(dtype), torch.randn(CHANNELS, TAPS).to(dtype)
    start = torch.randn(len(cu) - 1, CHANNELS, TAPS - 1).to(dtype) if state else None
    return [x, weight, torch.randn(CHANNELS).to(dtype)], torch.tensor(cu, dtype=torch.int32), start


def both(function, leaves):
    """Outputs and gradients of every leaf, with fixed gradients of the outputs."""
    own = [t.clone().requires_grad_() for t in leaves]
    outputs = [t for t in function(*own) if t.requires_grad]
    torch.manual_seed(1)
    given = [torch.randn(t.shape).to(t.dtype) for t in outputs]
    return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, own, given, allow_unused=True)]


def close(got, want):
    """What a portable implementation gave, handed through."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_gated_delta_rule(packing, state, dtype, fla):
    leaves, cu, start = rule_inputs(dtype, PACKINGS[packing], state)
    leaves += [start] if state else []

    def call(*own):
        return gated_delta_rule(*own[:5], cu, own[5] if state else None, keep_state=state)

    got = both(call, leaves)
    assert fla == ([] if packing == "none inside" else ["chunk", "chunk"])
    with providers.using({"gated_delta_rule": "portable"}):
        close(got, both(call, leaves))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_causal_conv1d(packing, state, dtype, fla):
    leaves, cu, start = conv_inputs(dtype, PACKINGS[packing], state)
    leaves += [start] if state else []

    def call(*own):
        return causal_conv1d(*own[:3], cu, own[3] if state else None, silu=not state, keep_state=state)

    got = both(call, leaves)
    assert fla == ([] if packing == "none inside" else ["conv", "conv"])
    with providers.using({"causal_conv1d": "portable"}):
        close(got, both(call, leaves))


def test_one_token_for_each_document_is_the_recurrent_function(fla):
    leaves, cu, start = rule_inputs(torch.bfloat16, [0, 1, 2, 3], True, tokens=3)
    out, final = gated_delta_rule(*leaves, cu, start, keep_state=True)
    assert fla == ["recurrent"]
    with providers.using({"gated_delta_rule": "portable"}):
        close([out, final], gated_delta_rule(*leaves, cu, start, keep_state=True))


def test_offsets_that_change_where_they_lie_count(fla):
    leaves, cu, _ = rule_inputs(torch.bfloat16, [0, 70, 150], False)
    before = gated_delta_rule(*leaves, cu)[0]
    cu.copy_(torch.tensor([0, 20, 150]))
    after = gated_delta_rule(*leaves, cu)[0]  # the stand-in compares the chunks with the offsets
    assert not torch.equal(before, after)


def test_opcheck(fla):
    leaves, cu, start = rule_inputs(torch.bfloat16, [0, 70, 150], True)
    own = [t.requires_grad_() for t in (*leaves, start)]
    opcheck(ops.gated_delta_rule, (*own[:5], cu, own[5], 0.25, True, True))
    dout, dfinal = torch.randn_like(leaves[2]), torch.randn_like(start)
    plain = [t.detach() for t in own]
    opcheck(ops.gated_delta_rule_backward, (dout, dfinal, *plain[:5], cu, plain[5], 0.25, True))
    leaves, cu, start = conv_inputs(torch.bfloat16, [0, 70, 150], True)
    own = [t.requires_grad_() for t in (*leaves, start)]
    opcheck(ops.causal_conv1d, (*own[:3], cu, own[3], True, True))
    plain = [t.detach() for t in own]
    need = [True, True, False, True]
    dy, dfinal = torch.randn_like(plain[0]), torch.randn_like(start)
    opcheck(ops.causal_conv1d_backward, (dy, dfinal, *plain[:3], cu, plain[3], True, need))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_over_three_packings(backend, fla):
    """No recompile, and the gradients of eager mode."""
    torch._dynamo.reset()
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def layer(x, weight, bias, k, g, beta, cu):
        y, _ = causal_conv1d(x, weight, bias, cu)
        v = y[:, :8].reshape(-1, HEADS, 4)
        return (gated_delta_rule(k, k * 0.5, v, g, beta, cu)[0],)

    compiled = torch.compile(layer, fullgraph=True, backend=counted)
    for offsets in ([0, 150, 150, 150], [0, 70, 71, 150], [0, 40, 100, 140]):
        inputs, cu, _ = conv_inputs(torch.bfloat16, offsets, False)
        (_, k, _, g, beta), _, _ = rule_inputs(torch.bfloat16, offsets, False)
        leaves = [*inputs, k, g, beta]
        got = both(lambda *own, cu=cu: compiled(*own, cu), leaves)
        close(got, both(lambda *own, cu=cu: layer(*own, cu), leaves))
    assert len(graphs) == 1
    assert set(fla) == {"chunk", "conv"}


def test_what_it_cannot_do_is_refused_by_name(fla):
    leaves, cu, _ = rule_inputs(torch.bfloat16, [0, 150], False)
    words = r"gated_delta_rule on cpu: fla: the dtype is float32, wanted bfloat16 or float16: fla would"
    with pytest.raises(ValueError, match=words):
        gated_delta_rule(*(t.float() for t in leaves), cu)
    for size, name in ((258, "keys"), (7, "keys"), (258, "values"), (7, "values")):
        q, _, v, *rest = leaves
        q = torch.zeros(TOKENS, 1, size).bfloat16() if name == "keys" else q
        v = torch.zeros(TOKENS, HEADS, size).bfloat16() if name == "values" else v
        with pytest.raises(ValueError, match=f"a head of {name} is {size}, wanted an even one up to 256"):
            gated_delta_rule(q, q, v, *rest, cu)
    (x, _, bias), cu, _ = conv_inputs(torch.bfloat16, [0, 150], False)
    for taps in (1, 5):
        with pytest.raises(
            ValueError, match=f"causal_conv1d on cpu: fla: there are {taps} taps, wanted 2 to 4"
        ):
            causal_conv1d(x, torch.zeros(CHANNELS, taps).bfloat16(), bias, cu)
    with pytest.raises(ValueError, match="fla: the dtype is float64"):
        causal_conv1d(x.double(), torch.zeros(CHANNELS, 4).double(), None, cu)


@pytest.mark.parametrize("calls", [gated_delta_rule_fla, causal_conv1d_fla])
def test_old_cards_are_refused(calls, monkeypatch):
    monkeypatch.setattr(calls, "capability_of", lambda device: (7, 5))
    tensors = [torch.zeros(2, 2, 2, dtype=torch.bfloat16)] * 4
    operator = calls.__name__.rpartition(".")[2].removesuffix("_fla")
    assert "compute capability 7.5, wanted 8.0 or more" in calls.why_not(operator, *tensors)
    assert "compute capability 7.5" in calls.why_not(operator + "_backward", *tensors, *tensors)


def source_of_fla():
    found = importlib.util.find_spec("fla")
    if found is None or not found.submodule_search_locations:
        pytest.skip("flash-linear-attention is not installed")
    return pathlib.Path(found.submodule_search_locations[0])


@pytest.mark.parametrize(
    ("file", "function"),
    [
        ("ops/gated_delta_rule/chunk.py", fla_stand_in.chunk_gated_delta_rule),
        ("ops/gated_delta_rule/fused_recurrent.py", fla_stand_in.fused_recurrent_gated_delta_rule),
        ("modules/causal_conv1d/ops.py", fla_stand_in.causal_conv1d),
    ],
)
def test_the_installed_library_has_these_arguments(file, function):
    """In this order, where they may be given by place; without importing what wants Triton."""
    tree = ast.parse((source_of_fla() / file).read_text())
    nodes = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function.__name__]
    theirs = [a.arg for a in nodes[0].args.args]
    ours = list(inspect.signature(function).parameters)
    assert [name for name in theirs if name in ours] == ours
    by_place = 5 if "chunk" in function.__name__ else 4 if "recurrent" in function.__name__ else 3
    assert theirs[:by_place] == ours[:by_place]


INTERPRETED = """
import torch
from triton.runtime.autotuner import Autotuner

def first(self, *args, **more):  # tuning wants a driver
    options = ("num_warps", "num_stages", "num_ctas", "maxnreg")
    own = {k: v for k, v in self.configs[0].all_kwargs().items() if k not in options}
    return self.fn.run(*args, **more, **own)

Autotuner.run = first
from monograph.ops import causal_conv1d_fla, gated_delta_rule_fla
from monograph.ops.causal_conv1d import portable_causal_conv1d, portable_causal_conv1d_backward
from monograph.ops.gated_delta_rule import portable_gated_delta_rule, portable_gated_delta_rule_backward

def same(theirs, portable):
    for got, want in zip(theirs, portable, strict=True):
        assert got.dtype == want.dtype
        largest = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * max(1.0, largest))

torch.manual_seed(0)
TOKENS = 80
for offsets in ([0, 66, 67, 80], [3, 70, 70, 77]):
    cu = torch.tensor(offsets, dtype=torch.int32)
    for stateful in (False, True):
        x, weight, bias = torch.randn(TOKENS, 10), torch.randn(10, 4), torch.randn(10)
        start = torch.randn(3, 10, 3) if stateful else None
        given = (x, weight, bias, cu, start, True)
        same(causal_conv1d_fla.causal_conv1d(*given, True), portable_causal_conv1d(*given, True))
        if not stateful:  # of the state it ends in an error of the interpreter
            given = (torch.randn(TOKENS, 10), torch.randn(3, 10, 3), *given, [True, True, True, False])
            same(causal_conv1d_fla.causal_conv1d_backward(*given), portable_causal_conv1d_backward(*given))
        q, k, v = (torch.randn(TOKENS, h, d) for h, d in ((1, 16), (1, 16), (2, 24)))
        g, beta = -torch.rand(TOKENS, 2), torch.rand(TOKENS, 2)
        start = torch.randn(3, 2, 16, 24) if stateful else None
        given = (q, k, v, g, beta, cu, start, 0.25, True)
        same(gated_delta_rule_fla.gated_delta_rule(*given, True), portable_gated_delta_rule(*given, True))
        given = (torch.randn(TOKENS, 2, 24), torch.randn(3, 2, 16, 24) if stateful else None, *given)
        same(
            gated_delta_rule_fla.gated_delta_rule_backward(*given),
            portable_gated_delta_rule_backward(*given),
        )
q, k, v = (torch.randn(3, h, d) for h, d in ((1, 16), (1, 16), (2, 24)))
g, beta, cu = -torch.rand(3, 2), torch.rand(3, 2), torch.arange(4, dtype=torch.int32)
given = (q, k, v, g, beta, cu, torch.randn(3, 2, 16, 24), 0.25, True, True)
same(gated_delta_rule_fla.gated_delta_rule(*given), portable_gated_delta_rule(*given))
print("the same")
"""


@pytest.mark.long
@pytest.mark.slow
def test_kernels_of_the_library_under_tritons_interpreter(tmp_path):
    """float32 on the CPU, forward and gradients. The interpreter gives a loop's counter as an `int`, which
    has no `to`: of a copy of the library that one word is taken away."""
    source = source_of_fla()
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("einops") is None:
        pytest.skip("triton or einops is not installed")
    shutil.copytree(source, tmp_path / "fla")
    file = tmp_path / "fla" / "ops" / "common" / "chunk_delta_h.py"
    file.write_text(file.read_text().replace("= i_t.to(tl.int64)", "= i_t"))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.stdout.split("\n")[-2:] == ["the same", ""], run.stderr[-3000:]
