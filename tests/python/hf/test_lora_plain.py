"""LoRA on a 16-bit base: the fused layer on plain weights against PEFT's, and its one graph."""

import copy

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch import nn

import monograph as mg
from monograph.hf.peft.lora_linear import LoraLinear
from monograph.nn import QuantLinear
from monograph.packing import PackedCollator
from monograph.recipe.config.read_config import read_config
from monograph.recipe.run.load_model import check_start, load_model
from support.recipe_files import make_instruction_world, small_recipe
from support.tiny_models import save_llama

pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self, dtype=torch.bfloat16, bias=True):
        super().__init__()
        self.up = nn.Linear(96, 160, bias=bias, dtype=dtype)
        self.down = nn.Linear(160, 96, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def gradients(model, x):
    x = x.clone().requires_grad_(True)
    y = model(x)
    y.float().pow(2).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if "lora_" in name}
    return {"y": y.detach(), "x": x.grad, **found}


@pytest.mark.parametrize("options", [{}, {"lora_bias": True}, {"use_rslora": True}], ids=str)
def test_forward_and_gradients_are_pefts_within_bf16(options):
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=["up", "down"], init_lora_weights=False, **options)
    peft_model = get_peft_model(Block(), config)
    exact = copy.deepcopy(peft_model).double()
    ours = mg.optimize(copy.deepcopy(peft_model))
    assert isinstance(ours.base_model.model.up, LoraLinear)
    x = torch.randn(7, 96, dtype=torch.bfloat16)
    want, got, peft = gradients(exact, x.double()), gradients(ours, x), gradients(peft_model, x)
    for name, reference in want.items():
        error = (got[name].double() - reference).norm() / reference.norm()
        # PEFT computes the adapter in fp32, we in bf16: rounded factors, 2^-8, four times over.
        bound = (peft[name].double() - reference).norm() / reference.norm() + 4 * 2**-8
        assert error <= bound, name
    x = torch.randn(33, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        whole = ours(x)
        assert torch.equal(ours(x[:5]), whole[:5])


def test_merging_is_pefts():
    torch.manual_seed(0)
    peft_model = get_peft_model(Block(), LoraConfig(r=8, target_modules=["up"], init_lora_weights=False))
    ours = mg.optimize(copy.deepcopy(peft_model))
    merged, wanted = ours.merge_and_unload(), peft_model.merge_and_unload()
    assert torch.equal(merged.up.weight, wanted.up.weight)


def test_what_stays_pefts():
    def taken(model, dtype=torch.bfloat16, **options):
        wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["up", "down"], **options))
        mg.optimize(wrapped)
        with torch.no_grad():
            wrapped(torch.randn(2, 96, dtype=dtype))
        return [isinstance(getattr(wrapped.base_model.model, name), LoraLinear) for name in ("up", "down")]

    for dtype in (torch.float32, torch.float16):
        with pytest.warns(UserWarning, match="fused none of 2"):
            assert taken(Block(dtype), dtype) == [False, False]
    shared = Block()
    shared.other = nn.Linear(96, 160, dtype=torch.bfloat16)
    shared.other.weight = shared.up.weight
    assert taken(shared) == [False, True]
    strided = Block()
    strided.up.weight = nn.Parameter(torch.randn(96, 160, dtype=torch.bfloat16).t())
    assert taken(strided) == [False, True]
    hooked = Block()
    hooked.down.register_forward_hook(lambda *_: None)
    assert taken(hooked) == [True, False]
    # DoRA's forward is PEFT's: the same bits.
    torch.manual_seed(0)
    dora = get_peft_model(Block(), LoraConfig(r=4, target_modules=["up"], use_dora=True))
    x = torch.randn(2, 96, dtype=torch.bfloat16)
    want = dora(x)
    assert torch.equal(mg.optimize(dora)(x), want)


def test_a_16_bit_llama_trains_as_one_graph(tmp_path):
    save_llama(tmp_path)
    model = mg.from_pretrained(tmp_path)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = mg.add_lora(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLinear)]
    assert len(layers) == 14
    collate = PackedCollator(pad_to_multiple_of=16)
    batches = [
        collate([{"input_ids": torch.arange(n) % 320} for n in lengths]) for lengths in ([9, 5], [20, 11])
    ]
    report = mg.doctor(model, batches)
    assert report.holds, str(report)


@pytest.mark.parametrize(("adapter", "start"), [("lora", True), ("qlora", "pissa")])
def test_the_recipe_takes_the_fused_layer_and_the_start(tmp_path, adapter, start):
    make_instruction_world(tmp_path)
    recipe = small_recipe(
        tmp_path, "alpaca", adapter=adapter, peft_init_lora_weights=start, output_dir=str(tmp_path / "out")
    )
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe))
    model = load_model(read_config(str(tmp_path / "recipe.yml")).recipe, str(tmp_path / "model"))
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLinear)]
    assert len(layers) == 14
    assert all(layer.fused for layer in layers)
    assert all(isinstance(layer.base_layer, QuantLinear) == (adapter == "qlora") for layer in layers)
    found = mg.adapter_start(model)
    assert (found is None) == (start is True)
    if found is not None:
        assert found.against_dense
        model.save_pretrained(tmp_path / "adapter")
        check_start(model, str(tmp_path / "adapter"))
        layers[3].lora_start_A["default"].weight[0] += 1
        with pytest.raises(ValueError, match="changed by another start"):
            check_start(model, str(tmp_path / "adapter"))
