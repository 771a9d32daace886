"""Our elementwise operators as the default of optimize and add_lora: what PEFT, torch and users do to it."""

import copy
import io
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import CohereConfig, Gemma2Config, Gemma3TextConfig, GPT2Config, Phi3Config, Qwen3Config

import monograph as mg
from monograph.hf.transformers.fused_layer import FusedLayer
from monograph.hf.transformers.fused_norm import FusedNorm
from monograph.recipe import check_keys
from monograph.recipe.run.load_model import load_model
from support.elementwise_models import IDS, build
from support.recipe_files import make_instruction_world, small_recipe

pytestmark = pytest.mark.filterwarnings("ignore:monograph.optimize fused none of")


def count(model, kind=FusedNorm):
    return sum(isinstance(module, kind) for module in model.modules())


def adapted(base, **options):
    torch.manual_seed(5)
    names = {"target_modules": "all-linear", "init_lora_weights": False, "r": 4, "task_type": "CAUSAL_LM"}
    return get_peft_model(base, LoraConfig(**(names | options)))


def test_what_is_known_is_taken_over_by_default(tmp_path):
    models = [adapted(build(Qwen3Config, torch.bfloat16)) for _ in range(3)]
    for model, chosen in zip(models, (None, True, False), strict=True):
        mg.optimize(model, elementwise=chosen)
    assert [count(model) for model in models] == [9, 9, 0]
    mg.optimize(models[0], elementwise=False)
    assert count(models[0]) == 9  # it stays as it is
    lora = LoraConfig(r=4, target_modules="all-linear")
    bases = [build(Qwen3Config, torch.bfloat16) for _ in range(2)]
    assert count(mg.add_lora(bases[0], lora)) == 9
    assert count(mg.add_lora(bases[1], lora, elementwise=False)) == 0
    root = make_instruction_world(tmp_path)
    recipe = check_keys(small_recipe(root, "instruction")).recipe
    assert count(load_model(recipe, recipe.base_model), FusedLayer) > 0


def test_nothing_known_is_no_warning_unless_asked_for():
    lora = LoraConfig(r=4, target_modules=["0"])
    model = get_peft_model(nn.Sequential(nn.Linear(8, 8)).bfloat16(), lora)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mg.optimize(model)
    with pytest.warns(UserWarning, match="fused nothing: no module of a known kind"):
        mg.optimize(model, elementwise=True)


def trio(config_class, **options):
    """Ours, transformers' with PEFT's, and the second in float64."""
    theirs = adapted(build(config_class), **options)
    ours = mg.optimize(copy.deepcopy(theirs), attention=False)
    return ours, theirs, copy.deepcopy(theirs).double()


def assert_close(ours, theirs, exact):
    off, their_off = ((t.double() - exact).norm() / exact.norm() for t in (ours, theirs))
    assert off <= 2 * their_off + 2**-20


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def logits(models):
    with torch.no_grad():
        return [model(IDS).logits for model in models]


@pytest.mark.parametrize(
    ("config_class", "changes", "layers"),
    [
        (Phi3Config, {"resid_pdrop": 0.0}, 0),  # gate and up are one projection, as are q, k and v
        (CohereConfig, {}, 0),
        (GPT2Config, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, 0),
        (Gemma2Config, {"attn_logit_softcapping": 2.0, "sliding_window": 4}, 2),
        (Gemma3TextConfig, {"sliding_window": 4}, 2),
    ],
)
def test_what_is_not_known_is_computed_by_its_own_code(config_class, changes, layers):
    names = {"target_modules": ["c_attn"], "fan_in_fan_out": True} if config_class is GPT2Config else {}
    theirs = adapted(build(config_class, **changes), **names)
    exact = copy.deepcopy(theirs).double()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*elementwise")
        ours = mg.optimize(copy.deepcopy(theirs), attention=False)
    assert count(ours, FusedLayer) == layers
    losses = [model.train()(input_ids=IDS, labels=IDS).loss for model in (ours, theirs, exact)]
    for loss in losses:
        loss.backward()
    assert_close(*(loss.detach() for loss in losses))
    assert_close(*(gradients(model) for model in (ours, theirs, exact)))


@pytest.mark.parametrize("dora", [False, True])
def test_what_peft_and_torch_do_to_a_model(dora, tmp_path):
    models = [model.eval() for model in trio(Qwen3Config, use_dora=dora)]
    ours, theirs, exact = models
    assert count(ours) == 9
    first = logits(models)
    assert_close(*first)
    mg.optimize(ours, attention=False)  # again
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for same in (ours, copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert count(same) == 9
        assert torch.equal(*logits([same, ours]))
    with ours.disable_adapter(), theirs.disable_adapter(), exact.disable_adapter():
        disabled = logits(models)
    assert_close(*disabled)
    assert not torch.equal(disabled[0], first[0])
    for model in models:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(input_ids=IDS, labels=IDS).loss.backward()
        model.gradient_checkpointing_disable()
        model.eval()
    assert_close(*(gradients(model) for model in models))
    tokens = [
        model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5, do_sample=False)
        for model in (ours, theirs)
    ]
    assert torch.equal(*tokens)
    ours.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(build(Qwen3Config), tmp_path / "adapter")
    mg.optimize(again, attention=False).eval()
    assert torch.equal(*logits([again, ours]))
    ours.double()
    rotary = "base_model.model.model.rotary_emb"
    exact.get_submodule(rotary).inv_freq.copy_(
        ours.get_submodule(rotary).inv_freq
    )  # float32's, rounded from float64
    assert torch.equal(*logits([ours, exact]))  # transformers' code
    assert torch.equal(logits([ours.float()])[0], first[0])
    merged = [model.merge_and_unload() for model in models]
    assert_close(*logits(merged))
    merged[0].save_pretrained(tmp_path / "merged")
    loaded = type(merged[1]).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert type(loaded) is type(merged[1])
    assert_close(logits([loaded])[0], *logits(merged[1:]))
