"""`python -m monograph merge CONFIG.yml`: the native merge with what the recipe knows."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import monograph as mg
from monograph.__main__ import main
from monograph.cli import native
from support.native_tool import run
from support.recipe_files import make_instruction_world, make_model, small_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_instruction_world(tmp_path_factory.mktemp("merge"))


@pytest.fixture
def called(monkeypatch):
    """The calls of the native program, which is run beside this process instead of in its place."""
    calls = []

    def exec_native(arguments):
        calls.append(arguments)
        run(*arguments)
        return 0

    monkeypatch.setattr(native, "exec_native", exec_native)
    return calls


def check_merged(root, out, merged, scale=32 / 4, **dequantised):
    """Base values and the adapter's product in float64, rounded once."""
    base = mg.from_pretrained(
        root / "model", mg.MonographConfig("nf4", double_quant=True), dtype=torch.float32
    )
    adapter = load_file(f"{out}/adapter_model.safetensors")
    stored = load_file(f"{merged}/model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    layer = base.get_submodule(name)
    dense = load_file(root / "model" / "model.safetensors")[f"{name}.weight"].double()
    weight = layer.dequantize(torch.float32).double() if dequantised["packed"] else dense
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
    want = weight + scale * (b @ a)
    # Half a unit in the last of bf16's 8 bits, and as much again where decoding rounds to bf16 first.
    assert (stored[f"{name}.weight"].double() - want).abs().max() <= 2**-8 * want.abs().max()
    assert (want - dense).abs().max() > 2**-6 * want.abs().max()


@pytest.mark.parametrize("adapter", ["qlora", "lora"])
def test_a_recipe_merges_its_adapter(root, tmp_path, called, adapter, capsys):
    path, out = tmp_path / "recipe.yml", tmp_path / "out"
    keys = small_recipe(root, "instruction", output_dir=str(out), adapter=adapter, torch_compile=False)
    path.write_text(json.dumps(keys))
    assert main(["merge", str(path)]) == 3
    assert "there is no adapter in output_dir" in capsys.readouterr().err
    assert main(["train", str(path), "--merge-lora"]) == 0
    base = ["dequantized", "--as", "nf4", "--as-double-quant"] if adapter == "qlora" else ["original"]
    wanted = [
        "merge",
        str(root / "model"),
        "--adapter",
        str(out),
        "--out",
        f"{out}-merged",
        "--base",
        *base,
    ]
    assert called == [wanted]
    check_merged(root, out, f"{out}-merged", packed=adapter == "qlora")
    # The folder alone, with options of the native program.
    assert main(["merge", str(out), "--to", "fp32", "--out", str(tmp_path / "other")]) == 0
    assert called[1] == [*wanted[:4], "--base", *base, "--to", "fp32", "--out", str(tmp_path / "other")]
    check_merged(root, out, tmp_path / "other", packed=adapter == "qlora")


def test_a_base_that_was_moved_is_named_by_base_model(root, tmp_path, called):
    """Either spelling of the key; another base is refused by its hash, there as everywhere."""
    path, out = tmp_path / "recipe.yml", tmp_path / "out"
    base = tmp_path / "base"
    shutil.copytree(root / "model", base)
    keys = small_recipe(root, "instruction", output_dir=str(out), torch_compile=False, max_steps=2)
    path.write_text(json.dumps(keys | {"base_model": str(base)}))
    assert main(["train", str(path)]) == 0
    base.rename(moved := tmp_path / "moved")
    options = {"--base-model": "0", "--base_model": "1", "--base-model=": "2", "--base_model=": "3"}
    for option, name in options.items():
        words = [f"{option}{moved}"] if option.endswith("=") else [option, str(moved)]
        recipe = str(out) if name == "0" else str(path)
        assert main(["merge", recipe, *words, "--out", str(tmp_path / name)]) == 0
        assert called[-1][1] == str(moved)
        check_merged(root, out, tmp_path / name, packed=True)
    make_model(tmp_path / "other", seed=3)
    other = ["--base-model", str(tmp_path / "other"), "--out", str(tmp_path / "no")]
    with pytest.raises(AssertionError, match="was trained on the base with hash"):
        main(["merge", str(path), *other])
    assert not (tmp_path / "no").exists()


def test_the_native_merge_needs_no_flags_after_a_recipe_on_16_bits(root, tmp_path):
    """Into the 16-bit base or what `quantize` makes of it, from the end or a checkpoint: the same bits."""
    path, out = tmp_path / "recipe.yml", tmp_path / "out"
    path.write_text(json.dumps(small_recipe(root, "instruction", output_dir=str(out), torch_compile=False)))
    assert main(["train", str(path)]) == 0
    run("quantize", root / "model", tmp_path / "nested", "--double-quant")
    run("quantize", root / "model", tmp_path / "plain")
    last = max(out.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    merged = []
    for number, (base, adapter) in enumerate(
        [(root / "model", out), (tmp_path / "nested", out), (tmp_path / "nested", last)]
    ):
        run("merge", base, "--adapter", adapter, "--out", tmp_path / f"{number}")
        merged.append(load_file(tmp_path / f"{number}" / "model.safetensors"))
    check_merged(root, out, tmp_path / "0", packed=True)
    for other in merged[1:]:
        assert other.keys() == merged[0].keys()
        assert all(torch.equal(other[name], merged[0][name]) for name in other)
    message = run("merge", tmp_path / "plain", "--adapter", last, "--out", tmp_path / "no", code=3).stderr
    assert "plain scales" in message
    assert "quantised scales" in message


def test_a_wrong_recipe_is_one_line_and_a_base_is_the_native_program_s(tmp_path, called, monkeypatch, capsys):
    assert main(["merge", str(tmp_path / "none.yml")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'none.yml'}: there is no such file\n"
    monkeypatch.setattr(native, "exec_native", lambda arguments: called.append(arguments) or 0)
    assert main(["merge", str(tmp_path), "--adapter", "a"]) == 0
    assert called == [["merge", str(tmp_path), "--adapter", "a"]]


def test_serve_with_writes_the_form_of_the_server(root, tmp_path, capfd):
    path, out = tmp_path / "recipe.yml", tmp_path / "out"
    keys = {
        "lora_rank_pattern": {"up_proj": 2},
        "peft_use_rslora": True,
        "torch_compile": False,
        "max_steps": 1,
    }
    path.write_text(json.dumps(small_recipe(root, "instruction", output_dir=str(out), **keys)))
    assert main(["train", str(path), "--serve-with", "vllm"]) == 0
    assert f"wrote {out}-vllm" in capfd.readouterr().out
    done = run("adapter", "check", root / "model", f"{out}-vllm", "--for", "vllm").stdout
    assert done.startswith("vLLM applies the adapter")
    config = json.loads((tmp_path / "out-vllm" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"]
    assert not config["use_rslora"]
