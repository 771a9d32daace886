"""`monograph merge` with quantised bases and outputs: onto what the adapter was trained on, and the loss."""

import json

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support.merge_reference import adapter_on, check_against_float64
from support.native_tool import run, run_json
from support.quantised_merges import check, expected
from support.tiny_models import bnb_config, load, logits, save_llama

# Rows of whole blocks: dequantising others on a CPU is wrong in bitsandbytes itself.
SIZES = {"hidden_size": 128, "intermediate_size": 192}


def dequantised(model) -> dict[str, torch.Tensor]:
    """Each 4-bit weight as bitsandbytes computes with it."""
    return {
        f"{name}.weight": bnb.dequantize_4bit(module.weight.data, module.weight.quant_state)
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear4bit"
    }


@pytest.mark.parametrize("double_quant", [False, True], ids=["plain", "nested"])
def test_onto_the_dequantised_weights_stored_or_not(tmp_path, double_quant):
    base = save_llama(tmp_path / "base", **SIZES)
    quantised = load(base, quantization_config=bnb_config(double_quant=double_quant))
    quantised.save_pretrained(tmp_path / "nf4")
    adapter_on(quantised, tmp_path / "adapter", torch.float32, target_modules=["q_proj", "down_proj"])
    trained_on = dequantised(load(tmp_path / "nf4"))
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    wanted = expected(trained_on, adapter, 2.0)
    assert len(wanted) == 14
    arguments = ["--adapter", tmp_path / "adapter", "--base", "dequantized", "--warn-below", "0", "--out"]
    run("merge", tmp_path / "nf4", *arguments, tmp_path / "out")
    check(tmp_path / "out", wanted)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert torch.isfinite(logits(load(tmp_path / "out"))).all()
    # The same from the base that was loaded in 4 bits. Nested scales of bitsandbytes on a CPU are not always
    # the nearest code, so only plain ones are equal bit for bit.
    flags = ["--as", "nf4"] + ["--as-double-quant"] * double_quant
    run("merge", base, *arguments, tmp_path / "out2", *flags)
    if not double_quant:
        first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "out2"))
        assert all(torch.equal(first[name], second[name]) for name in first)
    # Which one it is must be said, and must fit.
    refused = run("merge", tmp_path / "nf4", *arguments, tmp_path / "x", "--base", "original", code=2)
    assert "--base" in refused.stderr
    arguments[3] = "original"
    assert "is quantised (nf4)" in run("merge", tmp_path / "nf4", *arguments, tmp_path / "x", code=3).stderr
    arguments[3] = "dequantized"
    assert "--as nf4" in run("merge", base, *arguments, tmp_path / "x", code=3).stderr


def along_adapter(meant, error, factor_a):
    """|error V| / |meant| with V an orthonormal basis of the rows of A."""
    v = np.linalg.svd(factor_a.double().numpy(), full_matrices=False)[2]
    return np.linalg.norm(error @ v.T) / np.linalg.norm(meant)


@pytest.mark.parametrize("double_quant", [False, True], ids=["plain", "nested"])
def test_four_bits_keep_the_adapter_and_nearest_loses_it(tmp_path, double_quant):
    base = save_llama(tmp_path / "base", **SIZES)
    quantised = load(base, quantization_config=bnb_config(double_quant=False))
    quantised.save_pretrained(tmp_path / "nf4")
    adapter_on(quantised, tmp_path / "adapter", torch.float32, target_modules="all-linear", lora_alpha=8)
    arguments = ["merge", tmp_path / "nf4", "--adapter", tmp_path / "adapter", "--base", "dequantized"]
    to = ["--to", "nf4"] + ["--double-quant"] * double_quant
    wide = run_json(*arguments, "--to", "fp32", "--out", tmp_path / "fp32")
    assert wide["rounding"] == "nearest"
    assert wide["whole"]["error_along_adapter"] < 1e-5
    kept = run_json(*arguments, *to, "--out", tmp_path / "adapter-rounded")
    lost = run_json(*arguments, *to, "--rounding", "nearest", "--out", tmp_path / "nearest-rounded")
    assert (kept["rounding"], lost["rounding"]) == ("adapter", "nearest")
    assert kept["whole"]["error_along_adapter"] < lost["whole"]["error_along_adapter"] / 4
    assert abs(kept["whole"]["kept"] - 1) < 0.02
    assert kept["below_threshold"] == kept["above_error_threshold"] == 0
    # The report's figures are those of what bitsandbytes loads.
    trained_on = dequantised(load(tmp_path / "nf4"))
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    wanted = expected(trained_on, adapter, 1.0)
    for report, folder in ((kept, "adapter-rounded"), (lost, "nearest-rounded")):
        loaded = dequantised(load(tmp_path / folder))
        for row in report["weights"]:
            start = trained_on[row["name"]].double().numpy()
            meant = wanted[row["name"]] - start
            found = loaded[row["name"]].double().numpy() - start
            cosine = (meant * found).sum() / np.sqrt((meant**2).sum() * (found**2).sum())
            assert abs(cosine - row["cosine"]) < 1e-6, row["name"]
            assert abs((meant * found).sum() / (meant**2).sum() - row["kept"]) < 1e-6, row["name"]
            a = adapter["base_model.model." + row["name"].replace("weight", "lora_A.weight")]
            error = along_adapter(meant, found - meant, a)
            assert abs(error - row["error_along_adapter"]) < 1e-6, row["name"]
    assert torch.isfinite(logits(load(tmp_path / "adapter-rounded"))).all()


def test_which_rounding_and_the_refusals(tmp_path):
    model = load(save_llama(tmp_path / "base", **SIZES))
    adapter_on(model, tmp_path / "adapter", torch.float32)
    arguments = ["merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original"]
    out = ["--out", tmp_path / "out", "--force"]
    for to, wanted in (("fp4", "adapter"), ("mxfp8", "nearest"), ("fp8-block", "nearest")):
        assert run_json(*arguments, *out, "--to", to)["rounding"] == wanted
    assert run_json(*arguments, *out, "--to", "mxfp8", "--rounding", "adapter")["rounding"] == "adapter"
    refused = run(*arguments, *out, "--to", "bf16", "--rounding", "adapter", code=2).stderr
    assert "--rounding: is 'adapter', which is for a packed output; --to is 'bf16'" in refused
    assert "--rounding" in run(*arguments, *out, "--to", "nf4", "--rounding", "up", code=2).stderr


def test_dora_on_a_quantised_base_uses_its_norms(tmp_path):
    base = save_llama(tmp_path / "base", **SIZES)
    quantised = load(base, quantization_config=bnb_config(double_quant=False))
    quantised.save_pretrained(tmp_path / "nf4")
    adapter_on(quantised, tmp_path / "adapter", torch.float32, use_dora=True)
    run(
        "merge", tmp_path / "nf4", "--adapter", tmp_path / "adapter", "--base", "dequantized",
        "--out", tmp_path / "out", "--warn-below", "0",
    )  # fmt: skip
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    plain = load(base)
    with torch.no_grad():
        for name, weight in dequantised(load(tmp_path / "nf4")).items():
            plain.get_parameter(name).copy_(weight)
    assert isinstance(plain, LlamaForCausalLM)
    exact = PeftModel.from_pretrained(plain, tmp_path / "adapter").double().merge_and_unload()
    assert check_against_float64(tmp_path / "out", exact) <= 2
