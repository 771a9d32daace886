"""Models with experts: transformers' loop against `experts_implementation="monograph"` and packed ones."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

import monograph as mg
from monograph.hf.transformers.experts import experts_kind, is_experts
from monograph.nn.lazy_weight import LazyWeight
from monograph.nn.packed_experts import PackedExperts
from monograph.ops.experts import Activation
from support.dense_experts import CLOSE, dense_copy
from support.tiny_moe import FAMILIES, save_tiny, tiny_model, tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_transformers_loop(family):
    model = tiny_model(family)
    model.set_experts_implementation("eager")
    want = model(tokens()).logits
    model.set_experts_implementation("monograph")
    torch.testing.assert_close(model(tokens()).logits, want, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_quantised_while_loading(family, tmp_path):
    """Folders store experts one by one; transformers stacks them, and nobody leaves them dense."""
    folder = save_tiny(tmp_path, family)
    format = "mxfp4" if family == "gpt_oss" else "nf4"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=mg.MonographConfig(format)
    ).eval()
    layers = [layer for layer in model.modules() if isinstance(layer, PackedExperts)]
    assert layers
    assert not [
        layer for layer in model.modules() if is_experts(layer) and not isinstance(layer, PackedExperts)
    ]
    for layer in layers:
        assert sorted(layer.stacks) == sorted(layer.experts_kind.names)
        assert not [p for _, p in nn.Module.named_parameters(layer) if p.dim() == 3 and p.is_floating_point()]
    dense = dense_copy(folder, model)
    assert model.num_parameters() == dense.num_parameters()
    torch.testing.assert_close(model(tokens()).logits, dense(tokens()).logits, **CLOSE)


def packed_model(tmp_path, family="gpt_oss", format="nf4", dtype=torch.float32):
    folder = save_tiny(tmp_path, family)
    return mg.from_pretrained(folder, mg.MonographConfig(format), dtype=dtype).eval()


def experts_of(model):
    return next(layer for layer in model.modules() if isinstance(layer, PackedExperts))


def test_weights_are_honest(tmp_path):
    """Shape, dtype and device as those of the dense parameter; values when somebody computes with them."""
    layer = experts_of(packed_model(tmp_path))
    dense = experts = next(m for m in tiny_model("gpt_oss").modules() if is_experts(m))
    for name in ("gate_up_proj", "down_proj"):
        weight, own = getattr(layer, name), getattr(experts, name)
        assert isinstance(weight, LazyWeight)
        assert (weight.shape, weight.dtype, weight.device) == (own.shape, own.dtype, own.device)
        assert (weight - own).norm() < 0.15 * own.norm()
        with pytest.raises(RuntimeError, match="packed and frozen"):
            weight.add_(1)
    shown = dict(layer.named_parameters(recurse=False))
    assert {name for name, p in dense.named_parameters()} <= set(shown)
    assert "gate_up_proj" not in layer.state_dict()
    layer.to(torch.bfloat16)
    assert layer.gate_up_proj.dtype == layer.gate_up_proj_bias.dtype == torch.bfloat16
    assert layer.gate_up_proj_values.dtype == torch.uint8


def test_what_is_unknown_is_refused_by_name(tmp_path):
    config = Llama4TextConfig(hidden_size=32, intermediate_size=32, num_local_experts=2)
    with pytest.raises(ValueError, match="Llama4TextExperts does not call transformers' interface"):
        experts_kind(Llama4TextExperts(config))
    experts = next(m for m in tiny_model("qwen3_moe").modules() if is_experts(m))
    experts.has_post_expert_norm = True
    with pytest.raises(ValueError, match="Qwen3MoeExperts has a norm behind each expert"):
        experts_kind(experts)
    experts.has_post_expert_norm = False
    experts.act_fn = nn.Hardswish()
    with pytest.raises(ValueError, match=r"Qwen3MoeExperts has a gate of its own \(Hardswish\).*silu"):
        experts_kind(experts)
    folder = save_tiny(tmp_path, "qwen3_moe", hidden_act="relu")
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts.*cannot be packed.*skip_modules"):
        mg.from_pretrained(folder, mg.MonographConfig("nf4"))


def test_kinds():
    def kind(family, **changes):
        return experts_kind(next(m for m in tiny_model(family, **changes).modules() if is_experts(m)))

    assert kind("qwen3_moe").activation is Activation.SILU
    assert kind("qwen3_moe", hidden_act="gelu_pytorch_tanh").activation is Activation.GELU_TANH
    found = kind("gpt_oss", swiglu_limit=3.0)
    assert (found.activation, found.limit, found.alpha) == (Activation.GPT_OSS, 3.0, 1.702)
    assert (found.interleaved, found.transposed, found.bias) == (True, True, True)


def test_dequantize_gives_dense_experts(tmp_path):
    model = packed_model(tmp_path)
    want = model(tokens()).logits
    model.dequantize()
    assert not experts_of(model).stacks
    torch.testing.assert_close(model(tokens()).logits, want, **CLOSE)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_loss_of_the_router_is_transformers_own(family, tmp_path):
    folder = save_tiny(tmp_path, family)
    model = mg.from_pretrained(folder, mg.MonographConfig("nf4"), dtype=torch.float32).eval()
    options = {"labels": tokens(), "output_router_logits": True}
    got, want = model(tokens(), **options), dense_copy(folder, model)(tokens(), **options)
    torch.testing.assert_close(got.aux_loss, want.aux_loss, **CLOSE)
    torch.testing.assert_close(got.loss, want.loss, **CLOSE)
    assert got.aux_loss > 0.5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_dense_experts_are_one_graph(family):
    torch._dynamo.reset()
    model = tiny_model(family).train()
    model.config.use_cache = False
    model.set_experts_implementation("monograph")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for seed in range(3):
        assert torch.equal(compiled(tokens(seed=seed)).logits, model(tokens(seed=seed)).logits)
    assert counter.frame_count == 1


def test_dense_experts_that_were_called_are_one_graph():
    """As a graph of torch 2.11 needs it."""
    torch._dynamo.reset()
    model = tiny_model("gpt_oss").train()
    model.config.use_cache = False
    model.set_experts_implementation("monograph")
    want = model(tokens()).logits
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(tokens()).logits, want)


def test_autocast_returns_the_dtype_of_the_input():
    """As transformers' own implementations do; the products run in bfloat16."""
    model = tiny_model("gpt_oss")
    experts = next(m for m in model.modules() if is_experts(m))
    x, ids, weights = torch.randn(24, 64), torch.randint(0, 4, (24, 2)), torch.rand(24, 2)
    model.set_experts_implementation("eager")
    want = experts(x, ids, weights)
    model.set_experts_implementation("monograph")
    with torch.autocast("cpu", torch.bfloat16):
        got = experts(x, ids, weights)
    assert got.dtype == torch.float32
    assert 0 < (got - want).norm() <= 4 * 2**-8 * want.norm()
