"""One rule for both merges: the base is what the kernels multiply with, the rest is 64 bits rounded once."""

import pytest
import torch
from safetensors.torch import load_file

import monograph as mg
from support.merge_reference import adapter_on
from support.native_tool import run
from support.tiny_models import save_llama

CASES = [
    ("nf4", False, torch.bfloat16),
    ("nf4", True, torch.bfloat16),
    ("nf4", True, torch.float16),
    ("nf4", False, torch.float32),
    ("mxfp4", False, torch.bfloat16),
    ("nvfp4", False, torch.bfloat16),
    ("fp8-block", False, torch.bfloat16),
]


@pytest.mark.parametrize(("name", "double_quant", "dtype"), CASES)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_merge_and_unload_equals_the_native_merge_in_every_element(tmp_path, name, double_quant, dtype, dora):
    if dora and (name, double_quant) != ("nf4", True):
        pytest.skip("DoRA on one format")
    base = save_llama(tmp_path / "base", hidden_size=128, intermediate_size=192, dtype=dtype)
    model = mg.from_pretrained(str(base), mg.MonographConfig(name, double_quant=double_quant), dtype=dtype)
    peft_model = adapter_on(
        model, tmp_path / "adapter", torch.float32, target_modules="all-linear", use_dora=dora
    )
    flags = ["--base", "dequantized", "--as", name, "--warn-below", "-1", "--out", tmp_path / "out"]
    run("merge", base, "--adapter", tmp_path / "adapter", *flags, *["--as-double-quant"] * double_quant)
    wanted = load_file(tmp_path / "out" / "model.safetensors")
    found = peft_model.merge_and_unload().state_dict()
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert value.dtype == dtype
        assert torch.equal(found[key], value), (key, int((found[key] != value).sum()), value.numel())
