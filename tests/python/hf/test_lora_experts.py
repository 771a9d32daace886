"""PEFT's `target_parameters` on packed and dense experts: PEFT's result, its files, merging, one graph."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import monograph as mg
from monograph.hf.peft.lora_experts import LoraExperts
from monograph.nn.packed_experts import PackedExperts
from support.dense_experts import dense_copy
from support.expert_adapters import TARGETS, config, scaled
from support.tiny_moe import save_tiny, tiny_model, tokens

CLOSE = {"rtol": 0, "atol": 3e-5}


def step(model, ids):
    """The loss and the gradients of the adapter."""
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return out.logits.detach(), {name: g.clone() for name, g in gradients.items() if g is not None}


def packed(tmp_path, family, format="nf4"):
    folder = save_tiny(tmp_path / family, family)
    return folder, mg.from_pretrained(folder, mg.MonographConfig(format), dtype=torch.float32)


@pytest.mark.parametrize("targets", [TARGETS, TARGETS[:1], TARGETS[1:]], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_logits_and_gradients_of_peft(family, targets, tmp_path):
    """PEFT on the dequantised model adds B A to every expert; the same adapter on packed ones does not."""
    folder, model = packed(tmp_path, family)
    plain = scaled(get_peft_model(dense_copy(folder, model), config(targets)))
    ours = mg.add_lora(model, config(targets))
    assert all(isinstance(m, LoraExperts) for m in ours.modules() if hasattr(m, "parameter_name"))
    scaled(ours)
    want, want_gradients = step(plain, tokens())
    got, gradients = step(ours, tokens())
    torch.testing.assert_close(got, want, **CLOSE)
    assert set(gradients) == set(want_gradients)
    assert any(g.abs().max() > 1e-4 for g in gradients.values())
    for name, g in gradients.items():
        torch.testing.assert_close(g, want_gradients[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_dense_experts_are_taken_over(family):
    plain = scaled(get_peft_model(tiny_model(family), config()))
    plain.base_model.model.set_experts_implementation("eager")
    want, want_gradients = step(plain, tokens())
    ours = mg.optimize(scaled(get_peft_model(tiny_model(family), config())))
    got, gradients = step(ours, tokens())
    torch.testing.assert_close(got, want, **CLOSE)
    for name, g in gradients.items():
        torch.testing.assert_close(g, want_gradients[name], rtol=1e-3, atol=1e-6, msg=name)
    with ours.disable_adapter():
        torch.testing.assert_close(ours(tokens()).logits, tiny_model(family)(tokens()).logits, **CLOSE)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_files_are_pefts_own(family, tmp_path):
    folder, model = packed(tmp_path, family)
    ours = scaled(mg.add_lora(model, config())).eval()
    ours.save_pretrained(tmp_path / "adapter")
    want = ours(tokens()).logits
    base = dense_copy(folder, model.eval())
    plain = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(plain(tokens()).logits, want, **CLOSE)
    change = (plain(tokens()).logits - dense_copy(folder, model)(tokens()).logits).abs().max()
    assert change > 100 * CLOSE["atol"]
    plain.save_pretrained(tmp_path / "again")
    _, fresh = packed(tmp_path / "fresh", family)
    back = mg.optimize(PeftModel.from_pretrained(fresh, tmp_path / "again")).eval()
    assert torch.equal(back(tokens()).logits, want)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_merge_and_unmerge(family, tmp_path):
    _, model = packed(tmp_path, family)
    ours = scaled(mg.add_lora(model, config())).eval()
    layer = next(m for m in model.modules() if isinstance(m, PackedExperts))
    bytes_before = layer.gate_up_proj_values.clone()
    want = ours(tokens()).logits
    ours.merge_adapter()
    assert not layer.stacks
    torch.testing.assert_close(ours(tokens()).logits, want, **CLOSE)
    ours.unmerge_adapter()
    assert torch.equal(layer.gate_up_proj_values, bytes_before)
    assert torch.equal(ours(tokens()).logits, want)
    merged = ours.merge_and_unload()
    assert not [m for m in merged.modules() if isinstance(m, LoraExperts)]
    torch.testing.assert_close(merged(tokens()).logits, want, **CLOSE)


def test_two_adapters_side_by_side(tmp_path):
    folder, model = packed(tmp_path, "qwen3_moe")
    ours = mg.add_lora(model, config())
    ours.add_adapter("other", config(r=2))
    plain = get_peft_model(dense_copy(folder, model), config())
    plain.add_adapter("other", config(r=2))
    for each in (ours, plain):
        each.base_model.set_adapter(["default", "other"])
        scaled(each).eval()
    assert len([m for m in ours.modules() if isinstance(m, LoraExperts)]) == 4
    torch.testing.assert_close(ours(tokens()).logits, plain(tokens()).logits, **CLOSE)


def test_experts_are_added_when_asked(tmp_path):
    _, model = packed(tmp_path, "qwen3_moe")
    asked = LoraConfig(r=2, target_modules="all-linear")
    ours = mg.add_lora(model, asked, experts=True)
    assert asked.target_parameters is None
    names = [n for n, p in ours.named_parameters() if p.requires_grad]
    assert any("experts.base_layer.lora_A" in n for n in names)
    assert any("experts.lora_B" in n for n in names)
    assert any("q_proj" in n for n in names)
    trainable, total = ours.get_nb_trainable_parameters()
    dense = sum(p.numel() for p in tiny_model("qwen3_moe").parameters())
    assert total - trainable == dense
    with pytest.raises(ValueError, match="experts is True, Linear has none"):
        mg.add_lora(nn.Linear(4, 4), asked, experts=True)


def test_all_linear_has_the_experts_and_not_the_router(tmp_path):
    _, model = packed(tmp_path, "qwen3_moe")
    ours = mg.add_lora(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    assert not [n for n, _ in ours.named_parameters() if "gate.lora" in n or "gate.parametrizations" in n]
    assert any("experts.lora_B" in n for n, _ in ours.named_parameters())
    ids = tokens()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(input_ids=ids).logits, ours(input_ids=ids).logits)
    _, model = packed(tmp_path, "qwen3_moe")
    asked = LoraConfig(r=2, target_modules="all-linear", target_parameters=["gate.weight"])
    assert "gate.weight" in mg.add_lora(model, asked).peft_config["default"].target_parameters


def test_lora_on_a_bias_is_pefts_or_refused(tmp_path):
    targets = [*TARGETS, "mlp.experts.gate_up_proj_bias"]
    ids, found = tokens(), []
    for ours in (False, True):
        model = scaled(get_peft_model(tiny_model("gpt_oss"), config(targets)))
        if ours:
            mg.optimize(model, attention=False)
        found.append(step(model, ids))
    (want, gradients), (logits, own) = found
    torch.testing.assert_close(logits, want, **CLOSE)
    assert own.keys() == gradients.keys()
    _, model = packed(tmp_path, "gpt_oss")
    with pytest.raises(ValueError, match="names gate_up_proj_bias of packed experts, wanted gate_up_proj or"):
        get_peft_model(model, config(targets))


def test_hooks_and_activations_that_come_later():
    model = tiny_model("qwen3_moe")
    wrapped = scaled(get_peft_model(model, config()))
    ids = tokens()
    want = wrapped(input_ids=ids).logits
    mg.optimize(wrapped, attention=False)
    torch.testing.assert_close(wrapped(input_ids=ids).logits, want, **CLOSE)
    base = model.model.layers[0].mlp.experts.get_base_layer()
    calls = []
    handle = base.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(wrapped(input_ids=ids).logits, want, **CLOSE)
    assert calls == [1]
    handle.remove()
    for layer in model.model.layers:
        layer.mlp.experts.get_base_layer().act_fn = nn.GELU(approximate="tanh")
    changed = wrapped(input_ids=ids).logits
    base.register_forward_hook(lambda *_: None)
    model.model.layers[1].mlp.experts.get_base_layer().register_forward_hook(lambda *_: None)
    torch.testing.assert_close(changed, wrapped(input_ids=ids).logits, **CLOSE)
    assert not torch.allclose(changed, want, atol=1e-4)


class Parametrised(nn.Module):
    def forward(self, weight):
        return weight * 1


def test_a_parametrised_parameter_is_right_or_refused():
    """PEFT adds its LoRA again in each forward (peft 0.21)."""
    model = tiny_model("qwen3_moe")
    experts = [m.mlp.experts for m in model.model.layers]
    for layer in experts:
        nn.utils.parametrize.register_parametrization(layer, "gate_up_proj", Parametrised())
    targets = [f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(2)]
    ours = mg.optimize(scaled(get_peft_model(model, config(targets))))
    plain = scaled(get_peft_model(tiny_model("qwen3_moe"), config(targets)))
    first = ours(tokens()).logits
    torch.testing.assert_close(first, plain(tokens()).logits, **CLOSE)
    assert torch.equal(ours(tokens()).logits, first)

    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Module()
            self.experts.gate_up_proj = nn.Parameter(torch.randn(4, 8, 8))
            nn.utils.parametrize.register_parametrization(self.experts, "gate_up_proj", Parametrised())

    wrapped = get_peft_model(Unknown(), config(["experts.gate_up_proj"]))
    with pytest.raises(ValueError, match="gate_up_proj of ParametrizedModule is parametrised already"):
        mg.optimize(wrapped)


class Routes(TorchDispatchMode):
    """The experts that each call of the operator was given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.monograph.experts.default:
            self.given.append(args[1].unique().tolist())
        return func(*args, **(kwargs or {}))


def forget_routes(model):
    """All scores alike: every token goes to the same experts, and the others have none."""
    for name, parameter in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "router.weight", "router.bias")):
            parameter.data.zero_()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_one_graph_over_random_routes(family, tmp_path):
    """4 layers, checkpointed, packed; 20 batches, in the last one all tokens go to the same experts."""
    torch._dynamo.reset()
    folder = save_tiny(tmp_path / "folder", family, layers=4)
    model = mg.from_pretrained(folder, mg.MonographConfig("mxfp4"), dtype=torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ours = scaled(mg.add_lora(model, config(target_modules=["q_proj", "v_proj"]))).train()
    model.config.use_cache = False
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for batch in range(20):
        ids = tokens(seed=batch)
        if batch == 19:
            forget_routes(ours)
        got, gradients = step_of(compiled, ours, ids)
        if batch not in (0, 10, 19):
            continue
        want, want_gradients = step_of(ours, ours, ids)
        assert torch.equal(got, want), batch
        for name, g in gradients.items():
            assert torch.equal(g, want_gradients[name]), (batch, name)
    assert counter.frame_count == 1
    with Routes() as routes, torch.no_grad():
        ours(input_ids=ids)
    assert [len(given) for given in routes.given] == [2] * 4


def step_of(call, model, ids):
    model.zero_grad()
    out = call(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_peft_without_optimize(tmp_path):
    """get_peft_model alone, after `import monograph`: the wrapper is ours from the start."""
    folder, model = packed(tmp_path, "qwen3_moe")
    ours = scaled(get_peft_model(model, config())).eval()
    plain = scaled(get_peft_model(dense_copy(folder, model), config())).eval()
    torch.testing.assert_close(ours(tokens()).logits, plain(tokens()).logits, **CLOSE)


def test_a_dense_model_without_lora_trains_its_experts():
    """experts_implementation="monograph" alone: the gradients of transformers' loop."""
    one, other = (tiny_model("gpt_oss").train() for _ in range(2))
    one.set_experts_implementation("eager")
    other.set_experts_implementation("monograph")
    _, want = step(one, tokens())
    _, got = step(other, tokens())
    assert set(got) == set(want)
    for name, g in got.items():
        torch.testing.assert_close(g, want[name], rtol=1e-3, atol=1e-6, msg=name)
