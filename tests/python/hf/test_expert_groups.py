"""Experts in int4, int8 and fp8: stored one by one, quantised on load, trained, merged."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import monograph as mg
from monograph.nn.packed_experts import PackedExperts
from support.dense_experts import CLOSE, dense_copy
from support.expert_adapters import config, scaled
from support.native_tool import run, run_json
from support.producer_groups import compressed
from support.tiny_moe import save_tiny, tokens

CASES = {
    "int4": (("int4", 32, True), ["--block-size", "32"]),
    "int4-asymmetric": (("int4", 16, False), ["--block-size", "16", "--asymmetric"]),
    "int8": (("int8", 0, True), []),
    "int8-asymmetric": (("int8", 0, False), ["--asymmetric"]),
    "fp8": (("fp8", 0, True), []),
}


def layers(model):
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, PackedExperts)}


def stored_as(folder, family):
    """The weights of a folder as transformers has them: stacks."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def gradients(model):
    """On all linear layers too: dense ones without an adapter are torch's."""
    model = scaled(mg.add_lora(model, config(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])))
    model = mg.optimize(model)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(
    scope="module", params=[("qwen3_moe", case) for case in CASES] + [("mixtral", "int4-asymmetric")]
)
def folders(request, tmp_path_factory):
    """(family, case, the tool's options, the dense folder, the packed one, the packed one dequantised)"""
    family, name = request.param
    case, options = CASES[name]
    root = tmp_path_factory.mktemp(name)
    dense = save_tiny(root / "dense", family, dtype=torch.bfloat16)
    run("quantize", dense, root / "packed", "--to", case[0], "--experts", "separate", *options)
    run("dequantize", root / "packed", root / "back")
    return family, case, options, dense, root / "packed", root / "back"


def test_experts_stored_one_by_one_are_stacked(folders):
    family, _, _, dense, packed, back = folders
    model, want = mg.from_pretrained(packed).eval(), stored_as(back, family)
    assert len(layers(model)) == 2
    for path, layer in layers(model).items():
        assert sorted(layer.stacks) == ["down_proj", "gate_up_proj"]
        for name in layer.stacks:
            assert torch.equal(layer.dequantize(name), getattr(want.get_submodule(path), name)), (path, name)
    model = mg.from_pretrained(packed, dtype=torch.float32).eval()
    torch.testing.assert_close(model(tokens()).logits, dense_copy(dense, model)(tokens()).logits, **CLOSE)


def test_an_expert_is_what_the_producer_decodes(folders):
    pytest.importorskip("compressed_tensors")
    family, case, _, dense, packed, _ = folders
    names = ("mlp.experts.3.down_proj",) if family == "qwen3_moe" else ("block_sparse_moe.experts.3.w2",)
    weight = load_file(dense / "model.safetensors")[f"model.layers.0.{names[0]}.weight"]
    (layer, *_) = layers(mg.from_pretrained(packed)).values()
    assert torch.equal(layer.dequantize("down_proj")[3], compressed(weight, *case).decompressed())


def test_gradients_of_lora_are_those_on_the_dequantised_folder(folders):
    *_, packed, back = folders
    ours, plain = gradients(mg.from_pretrained(packed)), gradients(mg.from_pretrained(back))
    assert ours.keys() == plain.keys()
    for name, gradient in ours.items():
        assert gradient.isfinite().all(), name
        assert gradient.any(), name
        assert torch.equal(gradient, plain[name]), name


def test_experts_quantised_on_load_have_the_tools_values(folders, tmp_path):
    """Gate and up together: their rows, and so their scales and codes, are those of each alone."""
    _, (code, block, symmetric), _, dense, packed, _ = folders
    settings = mg.MonographConfig(code, block_size=block, symmetric=symmetric)
    model, tool = mg.from_pretrained(dense, settings).eval(), mg.from_pretrained(packed).eval()
    for ours, theirs in zip(layers(model).values(), layers(tool).values(), strict=True):
        for name, stack in ours.stacks.items():
            assert stack.grid_rows == stack.shape[1]
            assert torch.equal(ours.dequantize(name), theirs.dequantize(name))
    assert torch.equal(model(tokens()).logits, tool(tokens()).logits)
    wanted = (
        r"experts\.\w+: experts .* cannot be saved as a stack; .* --to int4\|int8\|fp8 --experts separate"
    )
    with pytest.raises(NotImplementedError, match=wanted):
        model.save_pretrained(tmp_path)


def test_the_tool_restores_and_merges(folders, tmp_path):
    """The adapter that was trained on packed experts merges into what the dequantised folder gives."""
    *_, packed, back = folders
    assert run_json("verify", packed)["findings"] == []
    model = scaled(mg.add_lora(mg.from_pretrained(packed), config()))
    model.save_pretrained(tmp_path / "adapter")
    options = ("--adapter", tmp_path / "adapter", "--warn-below", "0")
    run("merge", packed, *options, "--base", "dequantized", "--out", tmp_path / "ours")
    run("merge", back, *options, "--base", "original", "--out", tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    source = load_file(back / "model.safetensors")
    assert ours.keys() == theirs.keys() == source.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    changed = [key for key in ours if not torch.equal(ours[key], source[key])]
    assert changed
    assert all(".experts." in key for key in changed)


def test_a_folder_without_its_zero_points_is_refused(tmp_path):
    """Read as symmetric its numbers would be others, without a word."""
    dense = save_tiny(tmp_path / "dense", "qwen3_moe", dtype=torch.bfloat16)
    run("quantize", dense, tmp_path / "packed", "--to", "int4", "--experts", "separate", *CASES["int4"][1])
    path = tmp_path / "packed" / "config.json"
    settings = json.loads(path.read_text())
    settings["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    path.write_text(json.dumps(settings))
    state = load_file(tmp_path / "packed" / "model.safetensors")
    kept = {key: t for key, t in state.items() if "self_attn" not in key or "weight_" not in key}
    dense_state = load_file(dense / "model.safetensors")
    kept |= {key: t for key, t in dense_state.items() if "self_attn" in key}
    save_file(kept, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError) as error:
        mg.from_pretrained(tmp_path / "packed")
    assert error


def test_experts_of_several_kinds_are_refused(tmp_path):
    dense = save_tiny(tmp_path / "dense", "qwen3_moe", dtype=torch.bfloat16)
    run("quantize", dense, tmp_path / "packed", "--to", "int8", "--experts", "separate")
    path = tmp_path / "packed" / "model.safetensors"
    state = load_file(path)
    key = "model.layers.0.mlp.experts.2.down_proj.weight_scale"
    state[key] = state[key].float()
    save_file(state, path, {"format": "pt"})
    with pytest.raises(RuntimeError):
        mg.from_pretrained(tmp_path / "packed")
