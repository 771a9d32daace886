"""A mixture of experts from a GGUF file alone: gate and up as the two stacks that they are there."""

import re

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import monograph as mg
from monograph.hf.transformers.planned_model import planned_model
from monograph.memory.mapped_memory import MappedMemory
from monograph.nn import PackedExperts
from support.gguf_bases import mixed_base
from support.gguf_mixtures import (
    EXPERTS,
    IDS,
    TARGETS,
    changed,
    check_gradients,
    check_merging_in_memory,
    check_one_graph_and_one_adapter,
    layers_of,
)
from support.native_tool import run, run_json


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A mixture of types, and transformers' model with the values that the gguf package decodes."""
    return mixed_base("Qwen3Moe", tmp_path_factory.mktemp("moe"))


def test_values_and_logits_are_those_of_the_file(base):
    file, wanted = base
    model = mg.from_pretrained(file, dtype=torch.float32)
    assert model.config.model_type == "qwen3_moe"
    assert model.num_parameters() == wanted.num_parameters()
    state = wanted.state_dict()
    for path, layer in layers_of(model).items():
        gate, up = layer.packed("gate_up_proj").gate, layer.packed("gate_up_proj").up
        kinds = (gate.format.name, up.format.name, layer.packed("down_proj").format.name)
        assert kinds == ("q4_k", "q5_k", "q6_k")
        for name in EXPERTS:
            assert torch.equal(layer.dequantize(name), state[f"{path}.{name}"])
            assert torch.equal(getattr(layer, name) * 1, state[f"{path}.{name}"])
    assert len(layers_of(model)) == 2
    with torch.no_grad():
        logits = wanted(IDS).logits
        torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(model.dequantize()(IDS).logits, logits, rtol=1e-4, atol=1e-3)
    assert not any(layer.stacks for layer in layers_of(model).values())


def test_every_byte_of_the_stacks_stays_in_the_file(base):
    model = mg.from_pretrained(base[0])
    with MappedMemory() as memory:
        for path, layer in layers_of(model).items():
            stored = [name for name, _ in layer.named_parameters()]
            assert stored == ["down_proj_values", "gate_up_proj_gate_values", "gate_up_proj_up_values"]
            for name in stored:
                assert memory.extents(getattr(layer, name).data_ptr(), getattr(layer, name).nbytes), path


def test_gradients_are_those_of_transformers_and_peft(base):
    check_gradients(*base)


@pytest.mark.slow
def test_one_graph_and_the_adapter_of_the_decoded_folder_to_the_bit(base, tmp_path):
    file, _ = base
    before = file.read_bytes()
    dense = tmp_path / "dense"
    run("dequantize", file, dense)
    ours = check_one_graph_and_one_adapter([(file, {}), (dense, {"experts_implementation": "monograph"})])
    assert len(ours) == 2 * 2 * 6  # a and b of four linear layers and two stacks, in two layers
    assert file.read_bytes() == before


def test_merging_and_unmerging_in_memory(base):
    check_merging_in_memory(base[0])


PLAIN = {f"blk.0.ffn_{part}_exps.weight": "f32" for part in ("gate", "up", "down")}


def test_plain_stacks_beside_packed_ones(base):
    file = changed(base[0], PLAIN)
    model = mg.from_pretrained(file, dtype=torch.float32)
    assert [type(layer.mlp.experts) is PackedExperts for layer in model.model.layers] == [False, True]
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, base[1](IDS).logits, rtol=1e-4, atol=1e-3)


def test_mxfp4_beside_other_blocks(base):
    file = changed(base[0], {f"blk.1.ffn_{part}_exps.weight": "mxfp4" for part in ("up", "down")})
    layer = list(layers_of(mg.from_pretrained(file, dtype=torch.float32)).values())[1]
    gate, up = layer.packed("gate_up_proj").gate, layer.packed("gate_up_proj").up
    kinds = (gate.format.name, up.format.name, layer.packed("down_proj").format.name)
    assert kinds == ("q4_k", "ggml_mxfp4", "ggml_mxfp4")
    wanted = values_of(file)
    assert torch.equal(up.dequantize(torch.float32).double(), wanted["blk.1.ffn_up_exps.weight"])
    assert torch.equal(layer.dequantize("down_proj").double(), wanted["blk.1.ffn_down_exps.weight"])


def test_what_is_not_trained_as_it_lies_is_named(base):
    file = changed(base[0], {"blk.0.ffn_up_exps.weight": "f32"})
    message = "model.layers.0.mlp.experts: gate is q4_k and up f32, wanted both packed or both plain"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        mg.from_pretrained(file)
    assert "changed.gguf" in str(error.value)
    with pytest.raises(ValueError, match="which no quant method saves"):
        mg.from_pretrained(base[0]).save_pretrained(file.parent / "again")


def test_a_plan_has_the_stored_tensors(base):
    planned, loaded = planned_model(str(base[0]), None, True), mg.from_pretrained(base[0])
    for layer in layers_of(planned).values():
        assert layer.gate_up_proj_gate_values.device.type == "meta"
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (planned, loaded)]
    assert shapes[0] == shapes[1]


def deltas_of(folder, count=6):
    """W' - W of each stack of experts [E, out, in] that PEFT's adapter means, in float64."""
    config = LoraConfig.from_pretrained(folder)
    factors = load_file(folder / "adapter_model.safetensors")
    found = {}
    for name, a in factors.items():
        if ".experts." not in name or "lora_A" not in name:
            continue
        b = factors[name.replace("lora_A", "lora_B")].double()
        a = a.double().reshape(count, -1, a.shape[1])
        part = "gate_up_proj" if "base_layer" in name else "down_proj"
        scale = config.lora_alpha / a.shape[1]
        change = torch.einsum("o r e, e r i -> e o i", b.reshape(b.shape[0], -1, count), a) * scale
        layer = name.split(".layers.")[1].split(".")[0]
        if part == "down_proj":
            found[f"blk.{layer}.ffn_down_exps.weight"] = change
        else:
            halves = change.chunk(2, 1)
            for half, one in zip(("gate", "up"), halves, strict=True):
                found[f"blk.{layer}.ffn_{half}_exps.weight"] = one
    return found


def values_of(file):
    return {
        t.name: torch.from_numpy(gguf.quants.dequantize(np.asarray(t.data), t.tensor_type)).double()
        for t in gguf.GGUFReader(file).tensors
        if "_exps" in t.name
    }


def test_experts_are_merged_into_the_file(base, tmp_path):
    """Plain floats to the last bit but one; codes keep the change: its share along W' - W."""
    file = changed(base[0], PLAIN)
    model = mg.from_pretrained(base[0])
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj"], target_parameters=TARGETS)
    tuned = get_peft_model(model, config)
    for name, p in tuned.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.02)
    tuned.save_pretrained(tmp_path / "adapter")
    out = tmp_path / "merged.gguf"
    run("merge", file, "--adapter", tmp_path / "adapter", "--out", out, "--another-base")
    report = run_json("merge", file, "--adapter", tmp_path / "adapter", "--out", out, "--force", "--dry-run")
    assert report
    before, after, meant = values_of(file), values_of(out), deltas_of(tmp_path / "adapter")
    assert len(meant) == 6
    for name, change in meant.items():
        stored = after[name] - before[name]
        if name in PLAIN:
            wanted = before[name] + change
            assert (after[name] - wanted).abs().max() <= 2**-24 * wanted.abs().max(), name
            continue
        for expert in range(6):
            kept = (stored[expert] * change[expert]).sum() / change[expert].square().sum()
            assert 0.9 < kept < 1.1, (name, expert, kept)
    merged = mg.from_pretrained(out, dtype=torch.float32)
    kinds = [layer.packed("gate_up_proj").up.format.name for layer in layers_of(merged).values()]
    assert kinds == ["q5_k"]


def test_one_expert_is_merged_and_the_others_keep_their_bytes(base, tmp_path):
    """An adapter on modules of single experts, as models had them before."""
    file, _ = base
    module = "base_model.model.model.layers.0.mlp.experts.3.up_proj"
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator) * 0.05 for shape in ((4, 256), (256, 4)))
    LoraConfig(r=4, lora_alpha=4, target_modules=["up_proj"]).save_pretrained(tmp_path)
    save_file(
        {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, tmp_path / "adapter_model.safetensors"
    )
    out = tmp_path / "merged.gguf"
    run("merge", file, "--adapter", tmp_path, "--out", out)
    before, after = values_of(file), values_of(out)
    differ = {name for name in before if not torch.equal(before[name], after[name])}
    assert differ == {"blk.0.ffn_up_exps.weight"}
    change = (after[name := differ.pop()] - before[name]).flatten(1)
    assert [bool(one.any()) for one in change] == [False, False, False, True, False, False]
    meant = (b @ a).double().flatten()
    assert 0.9 < (change[3] @ meant) / (meant @ meant) < 1.1


def test_an_adapter_on_attention_is_merged_into_the_file(base, tmp_path):
    file, _ = base
    torch.manual_seed(1)
    model = mg.add_lora(
        mg.from_pretrained(file, dtype=torch.float32), LoraConfig(r=4, target_modules=["q_proj", "o_proj"])
    )
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.05)
    model.save_pretrained(tmp_path / "adapter")
    out = tmp_path / "merged.gguf"
    run("merge", file, "--adapter", tmp_path / "adapter", "--out", out)
    tensors = [{t.name: t.data.tobytes() for t in gguf.GGUFReader(one).tensors} for one in (file, out)]
    differ = {name for name, data in tensors[0].items() if tensors[1][name] != data}
    assert differ == {f"blk.{i}.attn_{part}.weight" for i in range(2) for part in ("q", "output")}
