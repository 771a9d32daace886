"""`monograph adapter convert`: the converted form, loaded back by PEFT, does what the original does.

So does the merged model, for LoRA on each kind of module alone. GGUF is read back with PyPI's gguf.
"""

import copy
import json

import gguf
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from support import tiny_experts
from support.adapter_checks import check, renamed
from support.native_tool import run, run_json
from support.served_adapters import ATTENTION, edit_config, edit_tensors, saved, saved_experts
from support.tiny_models import load, logits

MODULES = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "embed_tokens",
    "lm_head",
]
PATTERNS = {
    "target_modules": "all-linear",
    "rank_pattern": {"v_proj": 4, r"layers\.1.*gate_proj": 16},
    "alpha_pattern": {"q_proj": 3, "^model.layers.0.*up_proj": 7},
    "use_rslora": True,
}


def convert(folder, server, name="out", *more):
    out = folder / name
    report = run_json(
        "adapter", "convert", folder / "base", folder / "adapter", "--for", server, "--out", out, *more
    )
    return out, report


def logits_with(folder, adapter, double=False):
    """Those of the base with an adapter, by PEFT."""
    model = load(folder / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
    return logits(model.double() if double else model)


def change_of(found, base):
    return (found - base).norm() / base.norm()


@pytest.mark.parametrize("module", MODULES)
def test_each_kind_of_module_changes_the_logits_as_in_peft(tmp_path, module):
    """Of the converted and of the merged form. The scale, 2, is a power of two: the same bits."""
    saved("plain", tmp_path, target_modules=[module])
    out, report = convert(tmp_path, "vllm")
    assert report["rounded_modules"] == 0
    wanted, base = logits_with(tmp_path, tmp_path / "adapter"), logits(load(tmp_path / "base"))
    assert change_of(wanted, base) > 1e-3
    assert torch.equal(logits_with(tmp_path, out), wanted)
    run(
        "merge",
        tmp_path / "base",
        "--adapter",
        tmp_path / "adapter",
        "--base",
        "original",
        "--out",
        tmp_path / "merged",
    )
    merged = logits(load(tmp_path / "merged"))
    assert change_of(merged, wanted) < 1e-3 * change_of(wanted, base)
    for server in ("vllm", "peft"):
        done = run_json("adapter", "check", tmp_path / "base", out, "--for", server)
        assert done["findings"] == []


def test_patterns_and_rslora_become_one_rank_and_the_scale_inside_b(tmp_path):
    model = saved("plain", tmp_path, **PATTERNS)
    for server in ("vllm", "sglang", "peft"):
        out, report = convert(tmp_path, server, server)
        config = json.loads((out / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (16, 16, False)
        assert (config["rank_pattern"], config["alpha_pattern"], config["bias"]) == ({}, {}, "none")
        leaves = {name.rsplit(".", 1)[-1] for name in config["target_modules"]}
        assert leaves == set(MODULES[:7])
        assert server == "peft" or set(config["target_modules"]) == leaves
        assert report["rank"] == 16
        assert report["rounded_modules"] > 0
        for name, tensor in load_file(out / "adapter_model.safetensors").items():
            assert tensor.shape[0 if "lora_A" in name else 1] == 16
        done = run_json("adapter", "check", tmp_path / "base", out, "--for", server)
        assert done["findings"] == []
        # Each product of the scale is rounded once to fp32, the float64 model sees no other difference.
        exact = logits(copy.deepcopy(model).double())
        assert change_of(logits_with(tmp_path, out, double=True), exact) < 2**-24 * 10


def test_factors_keep_their_type_where_the_scale_is_a_power_of_two(tmp_path):
    saved("plain", tmp_path, torch.bfloat16)
    out, report = convert(tmp_path, "vllm")
    before, after = (load_file(p / "adapter_model.safetensors") for p in (tmp_path / "adapter", out))
    assert before.keys() == after.keys()
    assert report["rounded_modules"] == 0
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name] * (2 if "lora_B" in name else 1))
        assert tensor.dtype == torch.bfloat16
    edit_config(tmp_path / "adapter", lora_alpha=12)
    out, report = convert(tmp_path, "vllm", "rounded")
    after = load_file(out / "adapter_model.safetensors")
    # 8 bits of bf16 times 1.5 fit into fp32.
    for name, tensor in after.items():
        wanted = before[name].float() * 1.5 if "lora_B" in name else before[name]
        assert torch.equal(tensor, wanted)
        assert tensor.dtype == wanted.dtype
    assert report["rounded_modules"] == len(after) // 2


def test_names_are_repaired(tmp_path):
    """The name of the adapter inside, no prefix, and all-linear as other trainers leave it."""
    saved("all_linear", tmp_path)
    wanted = load_file(convert(tmp_path, "vllm")[0] / "adapter_model.safetensors")
    edit_tensors(tmp_path / "adapter", renamed(".weight", ".default.weight"))
    edit_tensors(tmp_path / "adapter", renamed("base_model.model.", ""))
    edit_config(tmp_path / "adapter", target_modules="all-linear")
    out, report = convert(tmp_path, "sglang", "repaired")
    found = load_file(out / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert report["target_modules"] == sorted(MODULES[:7])


def test_sglang_gets_zeros_where_it_keeps_several_modules_in_one_layer(tmp_path):
    saved("one_of_a_layer", tmp_path)
    out, report = convert(tmp_path, "sglang")
    assert report["zero_modules"] == 6  # q, v and gate of two layers
    assert torch.equal(logits_with(tmp_path, out), logits_with(tmp_path, tmp_path / "adapter"))
    assert run_json("adapter", "check", tmp_path / "base", out, "--for", "sglang")["findings"] == []


def change_of_module(tensors, module, rank):
    """scale * B * A of one module of a converted adapter: the scale is 1."""
    a, b = (tensors[f"base_model.model.{module}.lora_{x}.weight"].double() for x in "AB")
    assert a.shape[0] == b.shape[1] == rank
    return b @ a


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
@pytest.mark.parametrize("parameters", ["gate_up_proj", "down_proj", "both"])
def test_experts_one_by_one_are_the_change_that_peft_trains(tmp_path, name, parameters):
    targets = ["gate_up_proj", "down_proj"] if parameters == "both" else [parameters]
    settings = {
        "target_parameters": [f"experts.{p}" for p in targets],
        "rank_pattern": {"experts.down_proj": 2},
    }
    model = saved_experts(name, tmp_path, use_rslora=True, **settings)
    out, report = convert(tmp_path, "vllm")
    served = load_file(out / "adapter_model.safetensors")
    merged = dict(copy.deepcopy(model).double().merge_and_unload().named_parameters())
    where, leaves = "mlp.experts", ("gate_proj", "up_proj", "down_proj")
    if name == "mixtral":
        where, leaves = "block_sparse_moe.experts", ("w1", "w3", "w2")
    rank = report["rank"]
    for parameter in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{parameter}"
        change = merged[key] - tiny_experts.model(name, torch.float32).double().get_parameter(key)
        for expert in range(3):
            parts = leaves[:2] if parameter == "gate_up_proj" else leaves[2:]
            found = [
                change_of_module(served, f"model.layers.0.{where}.{expert}.{part}", rank) for part in parts
            ]
            assert (torch.cat(found) - change[expert]).abs().max() < 1e-7
            assert parameter in targets or not torch.cat(found).any()
    assert check_folder(tmp_path, out, "vllm") == []
    # For PEFT experts stay in one tensor, with the same logits.
    out, _ = convert(tmp_path, "peft", "peft")
    wanted = logits_with(tmp_path, tmp_path / "adapter")
    assert (
        change_of(logits_with(tmp_path, out), wanted)
        < 1e-5
        < change_of(wanted, logits(load(tmp_path / "base")))
    )
    assert check_folder(tmp_path, out, "peft") == []


def check_folder(folder, adapter, server):
    return run_json("adapter", "check", folder / "base", adapter, "--for", server)["findings"]


REFUSED = {
    "dora": "DoRA",
    "modules_to_save": "whole modules",
    "tokens": "trained tokens",
    "lora_bias": "bias",
    "biases": "bias",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_form_can_hold_is_refused_and_nothing_is_written(tmp_path, kind):
    saved(kind, tmp_path)
    for server, out in (("vllm", "out"), ("sglang", "out"), ("llama.cpp", "out.gguf")):
        message = run(
            "adapter",
            "convert",
            tmp_path / "base",
            tmp_path / "adapter",
            "--for",
            server,
            "--out",
            tmp_path / out,
            code=3,
        ).stderr
        assert REFUSED[kind] in message
        assert "monograph merge" in message
    message = run(
        "adapter",
        "convert",
        tmp_path / "base",
        tmp_path / "adapter",
        "--for",
        "peft",
        "--out",
        tmp_path / "out",
        code=3,
    ).stderr
    assert "PEFT applies the adapter as it is" in message
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


def test_refusals_of_the_output(tmp_path):
    saved("plain", tmp_path)
    command = ["adapter", "convert", tmp_path / "base", tmp_path / "adapter"]
    assert "must end in .gguf" in run(*command, "--for", "llama.cpp", "--out", tmp_path / "x", code=2).stderr
    assert "must be a folder" in run(*command, "--for", "vllm", "--out", tmp_path / "x.gguf", code=2).stderr
    assert (
        "at most 4" in run(*command, "--for", "vllm", "--out", tmp_path / "x", "--max-rank", 4, code=3).stderr
    )
    run(*command, "--for", "vllm", "--out", tmp_path / "adapter" / "inside", code=3)
    assert "would write" in run(*command, "--for", "vllm", "--out", tmp_path / "x", "--dry-run").stdout
    assert not (tmp_path / "x").exists()
    for server, out in (("vllm", "x"), ("llama.cpp", "x.gguf")):
        run(*command, "--for", server, "--out", tmp_path / out)
        run(*command, "--for", server, "--out", tmp_path / out, code=3)
        run(*command, "--for", server, "--out", tmp_path / out, "--dry-run", code=3)
        run(*command, "--for", server, "--out", tmp_path / out, "--force")


def test_a_product_beyond_fp32_is_refused(tmp_path):
    saved("plain", tmp_path)
    edit_config(tmp_path / "adapter", lora_alpha=1e42)
    message = run(
        "adapter",
        "convert",
        tmp_path / "base",
        tmp_path / "adapter",
        "--for",
        "vllm",
        "--out",
        tmp_path / "out",
        code=3,
    ).stderr
    assert "lora_B.weight" in message
    assert "fp32" in message


def read_gguf(path):
    reader = gguf.GGUFReader(path)
    fields = {
        name: reader.get_field(name).contents() for name in reader.fields if not name.startswith("GGUF.")
    }
    return fields, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def test_the_gguf_file_is_what_the_gguf_package_reads(tmp_path):
    saved("plain", tmp_path, target_modules=MODULES, rank_pattern={"v_proj": 4})
    out, report = convert(tmp_path, "llama.cpp", "my lora.gguf")
    fields, tensors = read_gguf(out)
    assert fields == {
        "general.architecture": "llama", "general.type": "adapter", "general.name": "my lora",
        "adapter.type": "lora", "adapter.lora.alpha": 8.0,
    }  # fmt: skip
    source = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj"}  # fmt: skip
    assert len(tensors) == 2 * (2 * len(names) + 2) == 2 * report["modules"]
    for layer in range(2):
        for ours, theirs in names.items():
            a, b = (source[f"base_model.model.model.layers.{layer}.{theirs}.lora_{x}.weight"] for x in "AB")
            rank, scale = a.shape[0], 16 / a.shape[0]
            found_a, found_b = (tensors[f"blk.{layer}.{ours}.weight.lora_{x}"] for x in "ab")
            heads = {"attn_q": 4, "attn_k": 2}.get(ours)
            if heads:  # the two halves of a head become neighbours
                b = b.reshape(heads, 2, -1, rank).transpose(1, 2).reshape(b.shape)
            assert np.array_equal(found_a[:rank], a)
            assert not found_a[rank:].any()
            assert np.array_equal(found_b[:, :rank], b * scale)
            assert not found_b[:, rank:].any()
    embedding = source["base_model.model.model.embed_tokens.lora_embedding_A"]
    assert np.array_equal(tensors["token_embd.weight.lora_a"], embedding.T)
    assert tensors["output.weight.lora_b"].shape == (320, 8)


def test_experts_in_gguf_are_stacked(tmp_path):
    saved_experts("qwen3", tmp_path, target_modules=ATTENTION)
    served = load_file(convert(tmp_path, "vllm")[0] / "adapter_model.safetensors")
    out, _ = convert(tmp_path, "llama.cpp", "lora.gguf")
    fields, tensors = read_gguf(out)
    assert fields["general.architecture"] == "qwen3moe"
    for ours, theirs in {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}.items():
        for x in "ab":
            name = "base_model.model.model.layers.0.mlp.experts.{}." + f"{theirs}.lora_{x.upper()}.weight"
            wanted = torch.stack([served[name.format(i)] for i in range(3)])
            assert np.array_equal(tensors[f"blk.0.ffn_{ours}_exps.weight.lora_{x}"], wanted)


def test_other_architectures_and_tied_embeddings_are_refused_for_llama_cpp(tmp_path):
    saved("plain", tmp_path, target_modules=["embed_tokens", "q_proj"], tie_word_embeddings=True)
    (finding,) = check(tmp_path, "llama.cpp")
    assert finding["rule"] == "tied-head"
    config = json.loads((tmp_path / "base" / "config.json").read_text()) | {"model_type": "falcon"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    message = run(
        "adapter",
        "convert",
        tmp_path / "base",
        tmp_path / "adapter",
        "--for",
        "llama.cpp",
        "--out",
        tmp_path / "x.gguf",
        code=3,
    ).stderr
    assert "'falcon'" in message or '"falcon"' in message
