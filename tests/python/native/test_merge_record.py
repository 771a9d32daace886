"""monograph.json beside an adapter: `monograph merge` reads it by itself and refuses a contradiction."""

import torch
from safetensors.torch import load_file

import monograph as mg
from monograph.recipe.run.base_fingerprint import make_base_fingerprint, packing_of, write_base_fingerprint
from support.merge_reference import adapter_on
from support.native_tool import run
from support.tiny_models import save_llama


def test_the_record_says_how_the_base_was_loaded(tmp_path):
    base, adapter = save_llama(tmp_path / "base"), tmp_path / "adapter"
    model = mg.from_pretrained(str(base), mg.MonographConfig("nf4", double_quant=True), dtype=torch.bfloat16)
    peft_model = adapter_on(model, adapter, torch.float32, target_modules="all-linear")
    packed = packing_of(peft_model)
    write_base_fingerprint(
        make_base_fingerprint(str(base), str(adapter), quantised=True, packed=packed), str(adapter)
    )
    wanted = peft_model.merge_and_unload().state_dict()

    def merge(folder, *options, code=0):
        command = ["merge", folder, "--adapter", adapter, "--warn-below", "-1"]
        return run(*command, "--out", tmp_path / "out", "--quiet", *options, code=code)

    def check():
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert set(found) == set(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        for path in (tmp_path / "out").iterdir():
            path.unlink()
        (tmp_path / "out").rmdir()

    # Neither --base nor --as: into the 16-bit folder, and into what quantize makes of it.
    merge(base)
    check()
    run("quantize", base, tmp_path / "nested", "--double-quant")
    merge(tmp_path / "nested")
    check()
    # What contradicts the record is refused, and both sides are named.
    trained = "was trained on nf4 with blocks of 64 and quantised scales"
    for flags, given in (
        (["--as", "nf4"], "--as says nf4 with blocks of 64 and plain scales"),
        (["--as", "mxfp4"], "--as says mxfp4"),
        (["--as", "nf4", "--as-double-quant", "--as-block-size", "128"], "blocks of 128"),
    ):
        message = merge(base, "--base", "dequantized", *flags, code=3).stderr
        assert trained in message
        assert given in message
    run("quantize", base, tmp_path / "plain")
    assert "the base is nf4 with blocks of 64 and plain" in merge(tmp_path / "plain", code=3).stderr
    assert "--base says original" in merge(base, "--base", "original", code=3).stderr
    assert not (tmp_path / "out").exists()


def test_without_a_record_base_must_be_said(tmp_path):
    base = save_llama(tmp_path / "base")
    model = mg.from_pretrained(str(base), mg.MonographConfig("nf4"), dtype=torch.bfloat16)
    adapter_on(model, tmp_path / "adapter", torch.float32)
    message = run("merge", base, "--adapter", tmp_path / "adapter", "--out", tmp_path / "out", code=2).stderr
    assert "--base" in message
