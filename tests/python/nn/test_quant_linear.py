"""QuantLinear in real models: one graph, no copy of the weight, PEFT's and bitsandbytes' habits."""

import pytest
import torch
import torch._dynamo
from bitsandbytes.nn import Linear4bit
from functorch.compile import min_cut_rematerialization_partition
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import monograph as mg
from monograph.nn import QuantLinear, replace_linears
from monograph.ops.formats import FORMATS
from support.tiny_models import tiny_llama

pytestmark = pytest.mark.slow


def llama(layers=4, **options):
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": layers, "vocab_size": 256}
    return replace_linears(tiny_llama(**sizes, attn_implementation="sdpa", use_cache=False), **options)


def test_forward_is_the_dequantised_layer():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        dense = nn.Linear(96, 64, dtype=dtype)
        layer = QuantLinear.from_linear(dense, "nf4", double_quant=True)
        x = torch.randn(5, 96, dtype=dtype)
        want = nn.functional.linear(x, layer.dequantize(), dense.bias)
        eps = {torch.bfloat16: 2**-7, torch.float32: 2**-18}[dtype]
        assert (layer(x) - want).norm() <= eps * want.norm()
        assert isinstance(layer, nn.Linear)
        assert "format=nf4" in repr(layer)


def test_weight_is_honest():
    layer = QuantLinear.from_linear(nn.Linear(96, 64, dtype=torch.bfloat16), "fp4")
    weight = layer.weight
    assert weight.shape == (64, 96)
    assert weight.dtype == torch.bfloat16
    assert weight.device.type == "cpu"
    assert torch.equal(weight + 0, layer.dequantize())
    assert torch.equal(weight.float().norm(dim=1), layer.dequantize().float().norm(dim=1))
    assert "weight" not in dict(layer.named_parameters())
    assert layer.float().weight.dtype == torch.float32
    assert layer.values.dtype == torch.uint8


def test_state_dict_round_trip():
    layer = QuantLinear.from_linear(nn.Linear(96, 64), double_quant=True)
    other = QuantLinear.from_linear(nn.Linear(96, 64), double_quant=True)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.dequantize(), layer.dequantize())
    assert all(t.dtype == torch.uint8 for n, t in layer.state_dict().items() if n != "bias")


def test_bitsandbytes_layers_load_without_repacking():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(128, 64, dtype=torch.bfloat16), nn.Linear(64, 128, dtype=torch.bfloat16))
    bnb_model = nn.Sequential(*(Linear4bit(m.in_features, m.out_features, quant_type="nf4") for m in model))
    bnb_model.load_state_dict(model.state_dict())
    bnb_model = bnb_model.to("cpu")
    state = bnb_model.state_dict()
    replace_linears(model, state=state, skip=())
    for i in (0, 1):
        assert isinstance(model[i], QuantLinear)
        assert model[i].values.data_ptr() == state[f"{i}.weight"].data_ptr()
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    with torch.enable_grad():
        want = bnb_model(x.clone().requires_grad_())
    assert (model(x) - want).norm() <= 2**-6 * want.norm()


def saved_floats(model, tokens):
    """Sizes of the float tensors that the compiled forward keeps for backward, seen by the partitioner."""
    kept = []

    def partition(joint, inputs, **options):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        outputs = next(n for n in forward.graph.nodes if n.op == "output").args[0]
        for node in outputs:
            value = node.meta.get("val") if hasattr(node, "meta") else None
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                kept.append(tuple(value.shape))
        return forward, backward

    backend = aot_autograd(fw_compiler=lambda g, i: g, partition_fn=partition)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    compiled(input_ids=tokens, labels=tokens).loss.backward()
    return kept


def test_the_compiled_graph_saves_no_float_of_weight_size():
    model = llama(layers=2)
    model.get_input_embeddings().weight.requires_grad_(True)
    model.lm_head.weight.requires_grad_(False)
    kept = saved_floats(model, torch.arange(40).reshape(2, 20))
    sizes = {m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantLinear)}
    assert kept
    for shape in kept:
        assert torch.Size(shape).numel() not in sizes, shape


# Graphs and recompiles are counted before the backend; one case runs through Inductor itself.
CASES = [
    ("nf4", True, False, "aot_eager"),
    pytest.param("nf4", True, True, "inductor", marks=pytest.mark.long),
    ("nf4", False, True, "aot_eager"),
    pytest.param("fp4", True, True, "aot_eager", marks=pytest.mark.long),
    pytest.param("fp4", False, False, "aot_eager", marks=pytest.mark.long),
    pytest.param("fp4", False, True, "aot_eager", marks=pytest.mark.long),
    pytest.param("mxfp4", False, False, "aot_eager", marks=pytest.mark.long),
    pytest.param("mxfp8", False, False, "aot_eager", marks=pytest.mark.long),
    ("nvfp4", False, False, "aot_eager"),
    pytest.param("fp8-block", False, False, "aot_eager", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "double_quant", "checkpointing", "backend"), CASES)
def test_one_graph_with_checkpointing_and_dynamic_lengths(name, double_quant, checkpointing, backend):
    """Fullgraph forward and backward, 0 breaks, 0 recompiles over six lengths."""
    layers = 4 if backend == "inductor" else 2 if checkpointing else 1
    model = llama(layers=layers, format=name, double_quant=double_quant)
    model.get_input_embeddings().weight.requires_grad_(True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for length in (24, 31, 40, 57, 64, 90):
        tokens = torch.arange(2 * length).reshape(2, length) % 256
        torch._dynamo.mark_dynamic(tokens, 1)
        with torch._dynamo.config.patch(error_on_recompile=length != 24):
            loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()
        eager = model(input_ids=tokens, labels=tokens).loss
        assert abs(loss.item() - eager.item()) <= 1e-4 * eager.item()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert model.get_input_embeddings().weight.grad.isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
def test_peft_lora_trains_on_top(name):
    """Every format is a base that LoRA learns on."""
    model = llama(layers=1, format=name, double_quant=name == "nf4")
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    assert isinstance(model.base_model.model.model.layers[0].mlp.up_proj.base_layer, QuantLinear)
    tokens = torch.arange(20)[None]
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_mg_linear_takes_a_packed_weight():
    w = mg.quantize(torch.randn(64, 96))
    x = torch.randn(3, 96, requires_grad=True)
    mg.linear(x, w).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3, 64) @ w.dequantize())
    torch.testing.assert_close(mg.linear(x, w, bias=torch.ones(64)), mg.linear(x, w) + 1)
    with pytest.raises(ValueError, match="transposed"):
        mg.linear(x, w.t())
