"""Gradients under Inductor: every parameter, against eager mode and a float64 model without our code.

One model holds every format and every kind of adapter, one a projection, because compiling is what costs:
packed rows with checkpointing in one graph of the whole step, in float32; padded rows in bf16.
"""

import itertools

import pytest
import torch
import torch._dynamo
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import monograph as mg
from monograph.nn import QuantLinear
from monograph.ops.gated_activation import gelu_mul, silu_mul
from monograph.ops.rms_norm import rms_norm
from monograph.ops.rotary import rotary
from monograph.ops.seeded_dropout import seed_dropouts
from monograph.packing import PackedCollator, PaddedCollator
from monograph.training import TrainStep, causal_lm_loss
from support.tiny_models import tiny_llama

pytestmark = pytest.mark.slow
CONFIG = {"num_hidden_layers": 1, "vocab_size": 128, "tie_word_embeddings": False}
# Every format, and every kind of adapter on it: (format, its options, DoRA, dropout).
PROJECTIONS = {
    "q_proj": ("nf4", {"double_quant": True}, False, 0.0),
    "k_proj": ("fp4", {}, True, 0.0),
    "v_proj": ("mxfp8", {}, False, 0.25),
    "o_proj": ("mxfp4", {}, True, 0.25),
    "gate_proj": ("nvfp4", {}, True, 0.0),
    "up_proj": ("fp8-block", {}, False, 0.25),
    "down_proj": ("nf4", {}, True, 0.25),
}
ROWS = [
    pytest.param({"packed", "checkpointing", "whole_step", "packed_head"}, marks=pytest.mark.long),
    {"bf16"},
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def with_adapters(model, wrap):
    """One adapter for each kind, all of them active."""
    found = None
    for dora, dropout in itertools.product((False, True), (0.0, 0.25)):
        names = [name for name, row in PROJECTIONS.items() if row[2:] == (dora, dropout)]
        config = LoraConfig(
            r=4, target_modules=names, use_dora=dora, lora_dropout=dropout, init_lora_weights=False
        )
        kind = f"{'dora' if dora else 'lora'}_{'dropped' if dropout else 'whole'}"
        torch.manual_seed(1)
        if found is None:
            found = get_peft_model(model, config, adapter_name=kind, **wrap)
        else:
            found.add_adapter(kind, config, **wrap)
    found.base_model.set_adapter(list(found.peft_config))
    return found


def replaced(model, row, build):
    """Every projection, and the head if the row says so, as `build(layer, format, options)`."""
    for name, layer in list(model.named_modules()):
        path, _, last = name.rpartition(".")
        if last in PROJECTIONS or (last == "lm_head" and "packed_head" in row):
            setattr(model.get_submodule(path), last, build(layer, *PROJECTIONS.get(last, ("nf4", {}))[:2]))
    return model


def base(row, **options):
    return tiny_llama(dtype=torch.bfloat16 if "bf16" in row else torch.float32, **CONFIG, **options)


def ours(row):
    model = replaced(base(row), row, lambda layer, name, how: QuantLinear.from_linear(layer, name, **how))
    if "checkpointing" in row:
        model.gradient_checkpointing_enable()
    return mg.optimize(with_adapters(model, {}))


class WideNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def reference(row):
    """PEFT over dense float64 weights that are the dequantised ones, in torch's own operators."""

    def dense(layer, name, how):
        packed = QuantLinear.from_linear(layer, name, **how)
        found = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.float64)
        found.weight.data = packed.dequantize(torch.float32).double()
        return found

    model = replaced(base(row, attn_implementation="sdpa"), row, dense).double()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LlamaRMSNorm):  # transformers' computes in float32
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, WideNorm(layer))
    return with_adapters(model, {"autocast_adapter_dtype": False})


def batch_of(row, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    collate = PackedCollator(max_documents=4) if "packed" in row else PaddedCollator()
    return collate([{"input_ids": torch.randint(0, 128, (n,), generator=generator)} for n in lengths])


def relative(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def reference_gradients(model, batch):
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask") if name in batch}
    seed_dropouts(model).fill_(0)
    logits = model.train()(**inputs, use_cache=False).logits
    labels = batch["labels"][:, 1:]
    loss = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
    )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss / (labels != -100).sum(), list(named.values()))
    return dict(zip(named, found, strict=True))


def step_gradients(step, batch):
    """Of one step from the start: the first moment is a tenth of the gradient, in every mode."""
    start = step.state_dict()
    step([batch], 1e-3)
    found = {name: part.clone() / 0.1 for name, part in step.state.views(step.state.exp_avg).items()}
    step.load_state_dict(start)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(sorted(row)) or "plain")
def test_every_gradient_is_as_near_to_float64_as_eager_modes(row):
    """Inductor sums in another order and rounds a fused chain once instead of at each link. So it may differ
    from eager mode, but not lie further from the exact gradient. The unit is the worst relative error of
    eager mode in the same step (about 2^-19 in float32, 2^-5 in bf16); both are sums of the same roundings
    upstream, twice the unit was seen, and four units are the bound."""
    mode = "inductor_whole_step" if "whole_step" in row else "inductor"
    eager = TrainStep(ours(row), mode="eager", max_grad_norm=0.0)
    compiled = TrainStep(ours(row), mode=mode, max_grad_norm=0.0)
    exact = reference(row)
    for number, lengths in enumerate([(19, 7, 12), (5, 23)]):
        batch = batch_of(row, lengths, number)
        want = reference_gradients(exact, batch)
        near = step_gradients(eager, batch)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            got = step_gradients(compiled, batch)
        assert got.keys() == near.keys() == want.keys()
        assert len(want) == 2 * 7 + 4
        unit = max(relative(near[name], value) for name, value in want.items())
        assert unit <= (2**-4 if "bf16" in row else 2**-17)
        worst = {name: relative(got[name], value) / unit for name, value in want.items()}
        assert max(worst.values()) <= 4, worst
    assert counters["stats"]["unique_graphs"] == 1


class Chain(nn.Module):
    """Each format with its adapter, one after the other, with a residual; then a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                name: QuantLinear.from_linear(nn.Linear(64, 64, bias=False), format, **options)
                for name, (format, options, *_) in PROJECTIONS.items()
            }
        )
        self.head = nn.Linear(64, 128, bias=False)

    def forward(self, x, labels):
        for layer in self.layers.values():
            x = x + checkpoint(layer, x, use_reentrant=False)
        return causal_lm_loss(x, self.head, labels, torch.tensor(37.0))


def test_without_a_reduction_of_inductors_the_bits_are_eager_modes():
    """LoRA with dropout over every format, checkpointed: Inductor's own code is element-wise here."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=list(PROJECTIONS), lora_dropout=0.25, init_lora_weights=False)
    model = mg.add_lora(Chain(), config)
    seed_dropouts(model).fill_(3)
    x, labels = torch.randn(2, 19, 64), torch.randint(0, 128, (2, 19))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    want = torch.autograd.grad(model(x, labels), list(named.values()))
    got = torch.autograd.grad(torch.compile(model, fullgraph=True)(x, labels), list(named.values()))
    for name, ours, eager in zip(named, got, want, strict=True):
        assert eager.abs().max() > 0, name
        assert torch.equal(ours, eager), name


def test_elementwise_operators_have_the_bits_of_eager():
    """With Inductor's code between them: halves, transposed heads and a sum, which it computes exactly in
    float32; in 16-bit types it leaves roundings out."""
    torch.manual_seed(0)
    x, residual = (torch.randn(2, 6, 64).requires_grad_() for _ in range(2))
    weight, head = (torch.randn(n).requires_grad_() for n in (64, 16))
    cos, sin = (torch.randn(1, 6, 8) for _ in range(2))

    def layer(x, residual, weight, head):
        y, s = rms_norm(x, weight, residual, one_plus_weight=True)
        q, k = y.view(2, 6, 4, 16).split(2, dim=2)
        q, k = rotary(q, k, cos, sin, head, head)
        q, k = (t.transpose(1, 2).reshape(2, 6, 32) for t in (q, k))
        gate, up = torch.cat((q, k), dim=-1).chunk(2, dim=-1)
        return silu_mul(gate, up) + gelu_mul(up, gate, tanh=True), s

    found = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        outs = function(x, residual, weight, head)
        above = [torch.ones_like(t) for t in outs]
        found.append((*outs, *torch.autograd.grad(outs, [x, residual, weight, head], above)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
