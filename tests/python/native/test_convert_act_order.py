"""`monograph convert` of GPTQ with act-order (desc_act): columns sorted by group, and who reads them."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from support import producer_folders
from support.gguf_models import model_of, save
from support.merge_reference import adapter_on
from support.native_tool import run, run_json
from support.producer_folders import tensors
from support.word_folders import Words, sorted_rows, write_words

DESC_ACT = {"desc_act": True}
CASES = {
    "gptq": Words(act_order=True, settings=DESC_ACT),
    "gptq-v2": Words(group=32, act_order=True, settings={**DESC_ACT, "checkpoint_format": "gptq_v2"}),
    "gptq-symmetric": Words(symmetric=True, act_order=True, settings=DESC_ACT),
    "gptq-8-bits": Words(bits=8, group=128, act_order=True, settings=DESC_ACT),
    "auto-round": Words("auto-round", act_order=True, settings={"packing_format": "auto_round"}),
}
IN_ORDER = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return producer_folders.make_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def sorted_base(source, tmp_path_factory):
    """(folder of GPTQ, what convert makes of it, values in fp32)."""
    folder = tmp_path_factory.mktemp("act_order")
    dense = write_words(source, folder / "words", CASES["gptq"])
    run("convert", folder / "words", folder / "rows", "--quiet")
    return folder / "words", folder / "rows", dense


def change(folder, edit):
    path = folder / "model.safetensors"
    state = load_file(path)
    edit(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


@pytest.mark.parametrize("case", CASES)
def test_columns_are_sorted_and_values_stay_the_same(tmp_path, source, case):
    words = CASES[case]
    dense = write_words(source, tmp_path / "words", words)
    run("convert", tmp_path / "words", tmp_path / "rows", "--quiet")
    config = json.loads((tmp_path / "rows" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "monograph"
    before, after = tensors(tmp_path / "words"), tensors(tmp_path / "rows")
    for name in dense:
        parts = {part: before[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
        found = {key.removeprefix(f"{name}."): t for key, t in after.items() if key.startswith(f"{name}.w")}
        want = sorted_rows(parts, words)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[part], want[part]) for part in want), name
    assert torch.equal(
        after["model.layers.0.self_attn.q_proj.bias"].float(),
        before["model.layers.0.self_attn.q_proj.bias"].float(),
    )
    run("verify", tmp_path / "rows")
    weights = {w["name"]: w for w in run_json("inspect", tmp_path / "rows")["weights"]}
    ours = [weights[f"{name}.weight"] for name in dense]
    assert all(w["sorted_columns"] and w["readable"] and w["written_by"] == "Monograph" for w in ours)
    assert {w["format"] for w in ours} == {f"int{words.bits}"}
    assert f"int{words.bits}+columns" in run("inspect", tmp_path / "rows").stdout
    run("dequantize", tmp_path / "rows", tmp_path / "plain", "--to", "fp32", "--quiet")
    plain = tensors(tmp_path / "plain")
    assert all(torch.equal(plain[f"{name}.weight"], weight) for name, weight in dense.items())
    difference = run_json("diff", tmp_path / "rows", tmp_path / "plain")
    assert difference["mismatches"] == 0


def test_a_weight_in_order_beside_others_says_so(tmp_path, source):
    dense = write_words(source, tmp_path / "words", CASES["gptq"])
    index = torch.arange(256, dtype=torch.int32) // 64

    def edit(state):
        state[f"{IN_ORDER}.g_idx"] = index

    change(tmp_path / "words", edit)
    run("convert", tmp_path / "words", tmp_path / "rows", "--quiet")
    found = tensors(tmp_path / "rows")
    assert torch.equal(found[f"{IN_ORDER}.weight_columns"], torch.arange(256, dtype=torch.int32))
    weights = {w["name"]: w["sorted_columns"] for w in run_json("inspect", tmp_path / "rows")["weights"]}
    assert {name for name in dense if not weights[f"{name}.weight"]} == {IN_ORDER}


def test_groups_in_order_keep_the_names_of_compressed_tensors(tmp_path, source):
    write_words(source, tmp_path / "words", Words(settings=DESC_ACT))
    run("convert", tmp_path / "words", tmp_path / "rows", "--quiet")
    config = json.loads((tmp_path / "rows" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert not any(name.endswith("columns") for name in tensors(tmp_path / "rows"))


@pytest.mark.slow
def test_a_program_without_monograph_refuses_the_folder(sorted_base):
    code = "import sys; from transformers import AutoModelForCausalLM as M; M.from_pretrained(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(sorted_base[1])], capture_output=True, text=True, timeout=600
    )
    assert done.returncode != 0
    assert "Unknown quantization type, got monograph" in done.stderr
    assert "MISMATCH" in done.stderr, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_has_the_order_of_the_model(tmp_path, sorted_base, source, dtype):
    _, rows, dense = sorted_base
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    adapter_on(model, tmp_path / "adapter", torch.float32)
    kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    options = ("--adapter", tmp_path / "adapter", "--base", "dequantized", "--quiet")
    run("merge", rows, *options, "--to", kind, "--out", tmp_path / "merged")
    merged, factors = tensors(tmp_path / "merged"), tensors(tmp_path / "adapter")
    changed = 0
    for name, weight in dense.items():
        base = weight.half().double()  # the type the folder says the weight was made from
        a, b = (factors.get(f"base_model.model.{name}.lora_{x}.weight") for x in "AB")
        if a is not None:
            changed += 1
            base = base + 2.0 * (b.double() @ a.double())
        want = base.float().to(dtype)
        near = merged[f"{name}.weight"].double() - base
        assert torch.equal(merged[f"{name}.weight"], want) or (near.abs() <= 2**-8 * base.abs()).all()
        assert (merged[f"{name}.weight"] != want).float().mean() < 1e-3
    assert changed == 3
    for to in ("int4", "int8"):
        done = run("merge", rows, *options, "--to", to, "--out", tmp_path / to, code=3)
        assert "its columns are sorted by group (act-order)" in done.stderr
        assert not (tmp_path / to).exists()


def test_what_is_quantised_again_is_read_in_the_order_of_the_model(tmp_path, sorted_base):
    _, rows, _ = sorted_base
    run("dequantize", rows, tmp_path / "plain", "--quiet")
    run("quantize", rows, tmp_path / "a", "--to", "nf4", "--requantize", "--quiet")
    run("quantize", tmp_path / "plain", tmp_path / "b", "--to", "nf4", "--quiet")
    found, want = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want if name.endswith(".weight"))


def test_an_export_has_the_order_of_the_model(tmp_path):
    gguf = pytest.importorskip("gguf")
    save(model_of("Llama"), "Llama", tmp_path / "source")
    write_words(tmp_path / "source", tmp_path / "words", Words(group=32, act_order=True, settings=DESC_ACT))
    for file in (tmp_path / "source").glob("token*"):
        (tmp_path / "words" / file.name).write_bytes(file.read_bytes())
    run("convert", tmp_path / "words", tmp_path / "rows", "--quiet")
    run("dequantize", tmp_path / "rows", tmp_path / "plain", "--quiet")
    found = {}
    for folder in ("rows", "plain"):
        run("export", tmp_path / folder, tmp_path / f"{folder}.gguf", "--type", "f32", "--quiet")
        reader = gguf.GGUFReader(tmp_path / f"{folder}.gguf")
        found[folder] = {tensor.name: tensor.data.tobytes() for tensor in reader.tensors}
    assert found["rows"] == found["plain"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda index: index.__setitem__(5, -1), "g_idx puts input 5 into group -1, wanted 0 to 3"),
        (lambda index: index.__setitem__(5, 4), "g_idx puts input 5 into group 4, wanted 0 to 3"),
        (lambda index: index.fill_(2), "g_idx puts 0 inputs into group 0, wanted 64 in each"),
    ],
)
def test_an_index_that_is_none_is_named(tmp_path, source, edit, message):
    write_words(source, tmp_path / "words", CASES["gptq"])
    name = "model.layers.1.self_attn.k_proj"
    change(tmp_path / "words", lambda state: edit(state[f"{name}.g_idx"]))
    done = run("convert", tmp_path / "words", tmp_path / "rows", code=3)
    assert message in done.stderr
    assert name in done.stderr
    assert not (tmp_path / "rows").exists()


def test_an_index_of_another_length_is_named(tmp_path, source):
    write_words(source, tmp_path / "words", CASES["gptq"])
    name = "model.layers.1.self_attn.k_proj.g_idx"
    change(tmp_path / "words", lambda state: state.update({name: state[name][:-1]}))
    done = run("convert", tmp_path / "words", tmp_path / "rows", code=3)
    assert "g_idx has the shape [255], wanted [256]" in done.stderr


def test_a_config_that_denies_the_index_is_named(tmp_path, source):
    write_words(source, tmp_path / "words", Words(act_order=True, settings={"desc_act": False}))
    done = run("convert", tmp_path / "words", tmp_path / "rows", code=3)
    assert "g_idx takes inputs out of order, and desc_act is false; wanted true" in done.stderr


def test_columns_and_the_method_of_the_folder_go_together(tmp_path, sorted_base):
    _, rows, _ = sorted_base
    config = json.loads((rows / "config.json").read_text())
    state, name = load_file(rows / "model.safetensors"), "model.layers.1.self_attn.q_proj.weight_columns"
    for folder, method, dropped in (("a", "monograph", {name}), ("b", "compressed-tensors", set())):
        (tmp_path / folder).mkdir()
        settings = config["quantization_config"] | {"quant_method": method}
        (tmp_path / folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        kept = {key: tensor for key, tensor in state.items() if key not in dropped}
        save_file(kept, tmp_path / folder / "model.safetensors")
    for command in ("verify", "inspect"):
        done = run(command, tmp_path / "a", code=3)
        assert "q_proj.weight' (Monograph int4): there is no columns" in done.stderr
        done = run(command, tmp_path / "b", code=3)
        assert "there is a columns, and quant_method is 'compressed-tensors'" in done.stderr
