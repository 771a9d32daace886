"""Reading a packed weight's attributes inside one graph, by torch's names and by bitsandbytes'."""

import itertools

import bitsandbytes as bnb
import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import Unsupported
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils.checkpoint import checkpoint

import monograph as mg
from monograph.nn import QuantLinear
from monograph.quant.quant_methods.bitsandbytes import to_bitsandbytes
from support import bnb_reference

SIZE = 64
# The unit roundoff of what a product is computed in, and the dtype of the weight.
MODES = {
    "bfloat16": (2**-8, torch.bfloat16),
    "float16": (2**-11, torch.float16),
    "float32": (2**-24, torch.float32),
    "autocast": (2**-8, torch.float32),
}


def layer_of(format="nf4", double_quant=True, dtype=torch.bfloat16, bias=True):
    torch.manual_seed(3)
    dense = nn.Linear(SIZE, SIZE, bias=bias, dtype=dtype)
    return QuantLinear.from_linear(dense, format, double_quant=double_quant)


def values_by_bitsandbytes(layer):
    """Its own functions on what `quant_state` says."""
    state = layer.weight.quant_state
    absmax = state.absmax
    if state.nested:
        absmax = bnb.functional.dequantize_blockwise(absmax, state.state2) + state.offset
    packed = layer.values.reshape(-1, 1)
    shape, block = state.shape, state.blocksize
    return bnb_reference.reference(packed, absmax, block, state.quant_type, shape, torch.float32)


def counted(function):
    """(compiled function, the names of the operators in its graphs)"""
    names = []

    def keep(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return torch.compile(function, fullgraph=True, backend=backend), names


def read_everything(layer, x):
    """A layer called the way careful code does, by what it reads of the weight."""
    weight = layer.weight
    assert not weight.requires_grad
    assert weight.shape == (layer.out_features, layer.in_features)
    assert weight.numel() == SIZE * SIZE
    state = getattr(weight, "quant_state")  # noqa: B009
    parts = [weight.absmax.float().sum(), getattr(weight, "quant_map").sum()]  # noqa: B009
    if state.nested:
        parts += [weight.nested_absmax.sum(), state.state2.code.sum(), weight.offset]
    y = layer(x.to(device=weight.device, dtype=weight.dtype))
    return y, torch.stack([part.float() for part in parts])


VARIANTS = list(
    itertools.product(("nf4", "fp4"), (False, True), MODES, (False, True), (False, True))  # 64
)


@pytest.mark.parametrize(("format", "nested", "mode", "checkpointed", "bias"), VARIANTS)
def test_one_graph_in_64_variants(format, nested, mode, checkpointed, bias):
    unit, dtype = MODES[mode]
    layer = layer_of(format, nested, dtype, bias)

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            if checkpointed:
                return checkpoint(read_everything, layer, x, use_reentrant=False)
            return read_everything(layer, x)

    x = torch.randn(3, SIZE, dtype=dtype, requires_grad=True)
    dense = values_by_bitsandbytes(layer).double()
    compiled, names = counted(forward)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            y, parts = compiled(x)
    (dx,) = torch.autograd.grad(y.float().sum(), [x])
    stats = torch._dynamo.utils.counters
    assert stats["stats"]["unique_graphs"] == 1
    assert not stats["graph_break"]
    assert not any("dequantize" in name for name in names), names  # read, and never made
    # Rounding of x, of the bias's sum and of the result, in a product that is summed in float32.
    own_bias = torch.zeros(SIZE).double() if layer.bias is None else layer.bias.double()
    size = x.detach().double().abs() @ dense.abs().t() + own_bias.abs()
    slack = 3 * unit + SIZE * 2**-24
    assert ((y.double() - (x.double() @ dense.t() + own_bias)).abs() <= slack * size).all()
    assert ((dx.double() - dense.sum(0)).abs() <= slack * dense.abs().sum(0)).all()
    assert torch.equal(parts, read_everything(layer, x)[1])


def test_computing_with_the_weight_in_a_graph():
    layer, x = layer_of(), torch.randn(3, SIZE).bfloat16()
    want = layer.dequantize()
    operations = {
        "matmul": lambda x: x @ layer.weight,
        "linear": lambda x: nn.functional.linear(x, layer.weight),
        "norm": lambda x: x + layer.weight.float().norm(dim=1).bfloat16(),
        "transposed": lambda x: x @ layer.weight.t(),
        "data": lambda x: x @ layer.weight.data,
        "ours": lambda x: x @ mg.dequantize_4bit(layer.weight, layer.weight.quant_state),
        "bitsandbytes": lambda x: (
            x @ bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        ),
    }
    dense = {
        "matmul": x @ want,
        "linear": nn.functional.linear(x, want),
        "norm": x + want.float().norm(dim=1).bfloat16(),
        "transposed": x @ want.t(),
    }
    for name, operation in operations.items():
        expected = dense.get(name, x @ want)
        assert torch.equal(operation(x), expected), name
        torch._dynamo.reset()
        got = torch.compile(operation, fullgraph=True, backend="aot_eager")(x)
        assert type(got) is torch.Tensor
        assert torch.equal(got, expected), name


def write_in_place(x, layer):
    layer.weight.add_(1)
    return x + 1


def write_an_element(x, layer):
    layer.weight[0, 0] = 1
    return x + 1


def write_data(x, layer):
    layer.weight.data = torch.zeros(SIZE, SIZE)
    return x + 1


def write_by_operator(x, layer):
    weight = layer.weight
    weight += 1
    return x + 1


def write_by_division(x, layer):
    weight = layer.weight
    weight /= 2
    return x + 1


def write_out(x, layer):
    torch.add(x, 1, out=layer.weight)
    return x + 1


@pytest.mark.parametrize(
    "write", [write_in_place, write_an_element, write_data, write_by_operator, write_by_division, write_out]
)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_write_is_refused_in_a_graph_as_outside(write, fullgraph):
    layer, x = layer_of(), torch.zeros(SIZE, SIZE).bfloat16()
    with pytest.raises(RuntimeError, match="writes to the weight of a QuantLinear"):
        write(x, layer)
    torch._dynamo.reset()
    compiled = torch.compile(write, fullgraph=fullgraph, backend="eager")
    # Without fullgraph the tracer leaves the line to Python, with it the trace fails and says why.
    wanted = Unsupported if fullgraph else RuntimeError
    with pytest.raises(wanted, match="writes to the weight of a QuantLinear" if not fullgraph else None):
        compiled(x, layer)


def resolved(owner, name):
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


@pytest.mark.parametrize("format", ["nf4", "fp8-block", "mxfp4"])
def test_every_dotted_name_leads_to_its_tensor(format):
    """As FSDP and distributed checkpoints walk a model: getattr along named_parameters and state_dict."""
    dense = nn.Linear(128, 128, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Sequential(QuantLinear.from_linear(dense, format)), nn.LayerNorm(128))
    parameters = dict(model.named_parameters())
    assert "0.0.values" in parameters
    for name, parameter in parameters.items():
        assert resolved(model, name) is parameter
    state = model.state_dict()
    assert state.keys() == parameters.keys()
    for name, tensor in state.items():
        assert resolved(model, name).data_ptr() == tensor.data_ptr()
    gathered = get_model_state_dict(model)  # torch's own walk
    assert gathered.keys() == state.keys()
    assert all(torch.equal(gathered[name], state[name]) for name in state)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_dotted_names_lead_to_its_parts(nested):
    """The keys that bitsandbytes would write, `weight.absmax` ... `weight.quant_state.bitsandbytes__nf4`."""
    layer = layer_of(double_quant=nested)
    stored = to_bitsandbytes(layer.packed, "weight")
    assert len(stored) == (6 if nested else 4)
    for name, tensor in stored.items():
        if name != "weight":
            assert torch.equal(resolved(layer, name), tensor), name
    again = bnb.functional.QuantState.from_dict(
        {name.removeprefix("weight."): tensor for name, tensor in stored.items() if name != "weight"}, "cpu"
    )
    state = layer.weight.quant_state
    for name in ("absmax", "code", "offset"):
        assert (getattr(state, name) is None) == (getattr(again, name) is None)
        assert getattr(again, name) is None or torch.equal(getattr(state, name), getattr(again, name))
    for name in ("blocksize", "quant_type", "dtype", "shape", "nested"):
        assert getattr(state, name) == getattr(again, name)


def test_parts_that_a_format_does_not_have_are_missing():
    assert not hasattr(layer_of(double_quant=False).weight, "nested_absmax")
    dense = nn.Linear(128, 128, dtype=torch.bfloat16)
    weight = QuantLinear.from_linear(dense, "fp8-block").weight
    assert not hasattr(weight, "quant_state")
    assert not hasattr(weight, "absmax")
