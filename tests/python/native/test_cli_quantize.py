"""monograph quantize and dequantize against transformers with bitsandbytes, on the same weights."""

import json
import os
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import monograph as mg
from support.native_tool import program, run, run_json
from support.tiny_models import bnb_config, load, logits, save_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = save_llama(tmp_path_factory.mktemp("sharded"), max_shard_size="200KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    return folder


def state_of(folder):
    state = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    return state


def text_of(tensor):
    return json.loads(bytes(tensor.tolist()))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("source", ["llama", "sharded"])
def test_logits_are_bitwise_those_of_quantising_in_transformers(quant_type, source, tmp_path, request):
    folder = request.getfixturevalue(source)
    ours = tmp_path / "ours"
    run("quantize", folder, ours, "--to", quant_type)
    bnb_model = load(folder, quantization_config=bnb_config(quant_type, False), dtype=torch.bfloat16)
    model = load(ours)
    kinds = {type(module).__name__ for module in model.modules()}
    assert "Linear4bit" in kinds
    assert type(model.lm_head).__name__ == "Linear"
    # Saved before it runs: on a CPU bitsandbytes repacks its weights at the first forward.
    bnb_model.save_pretrained(tmp_path / "bnb_model")
    assert torch.equal(logits(model), logits(bnb_model))
    mine, reference = state_of(ours), state_of(tmp_path / "bnb_model")
    assert mine.keys() == reference.keys()
    for key, tensor in reference.items():
        assert torch.equal(mine[key].view(torch.uint8), tensor.view(torch.uint8)), key
        assert mine[key].shape == tensor.shape


def test_nested_scales_differ_by_the_documented_search_only(llama, tmp_path):
    ours, folder = tmp_path / "ours", tmp_path / "bnb_model"
    run("quantize", llama, ours, "--double-quant")
    bnb_model = load(llama, quantization_config=bnb_config(), dtype=torch.bfloat16)
    bnb_model.save_pretrained(folder)
    mine, reference = state_of(ours), state_of(folder)
    assert mine.keys() == reference.keys()
    codes = differing = 0
    for key, tensor in reference.items():
        if key.endswith(".absmax"):
            table = mine[key.replace(".absmax", ".nested_quant_map")]
            step = (mine[key].int() - tensor.int()).abs()
            gap = (table[mine[key].long()] - table[tensor.long()]).abs()
            # A neighbour, or, where entries lie closer than the 65,536 bins, one within two bins.
            assert bool(((step <= 1) | (gap < 4 / 65536)).all()), key
            codes += step.numel()
            differing += int((step > 0).sum())
        elif ".quant_state." in key:
            a, b = text_of(mine[key]), text_of(tensor)
            assert a.pop("nested_offset") == pytest.approx(b.pop("nested_offset"), rel=3e-7)
            assert list(a.items()) == list(b.items())
        elif key.endswith(".nested_absmax"):
            torch.testing.assert_close(mine[key], tensor, rtol=1e-5, atol=1e-9)
        else:
            assert torch.equal(mine[key].view(torch.uint8), tensor.view(torch.uint8)), key
    assert differing / codes < 0.01
    # With our scales put into their file transformers computes the bits of our folder.
    for key in reference:
        if not key.endswith((".weight", ".bias")):
            reference[key] = mine[key]
    save_file(reference, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(load(ours)), logits(load(folder)))
    assert not torch.equal(logits(load(ours)), logits(load(llama)))


def test_monograph_reads_the_folder(llama, tmp_path):
    run("quantize", llama, tmp_path / "out", "--double-quant", "--block-size", "128")
    state, source = state_of(tmp_path / "out"), state_of(llama)
    name = "model.layers.1.mlp.up_proj.weight"
    packed = mg.from_bitsandbytes(state, name)
    expected = mg.quantize(source[name], "nf4", block_size=128, double_quant=True)
    assert torch.equal(packed.values.reshape(-1), expected.values.reshape(-1))
    assert torch.equal(packed.dequantize(), expected.dequantize())


def test_config_is_what_transformers_writes_and_the_rest_is_carried_over(llama, tmp_path):
    run("quantize", llama, tmp_path / "ours", "--double-quant")
    bnb_model = load(llama, quantization_config=bnb_config(), dtype=torch.bfloat16)
    bnb_model.save_pretrained(tmp_path / "bnb_model")
    ours = json.loads((tmp_path / "ours/config.json").read_text())
    reference = json.loads((tmp_path / "bnb_model/config.json").read_text())
    mine, wanted = ours.pop("quantization_config"), reference.pop("quantization_config")
    assert mine.pop("llm_int8_skip_modules") == ["lm_head"]
    assert wanted.pop("llm_int8_skip_modules") is None
    assert mine == wanted
    assert ours == reference
    assert (tmp_path / "ours/tokenizer_config.json").read_bytes() == (
        llama / "tokenizer_config.json"
    ).read_bytes()
    assert (tmp_path / "ours/generation_config.json").exists()


def test_tied_embeddings_and_a_skipped_layer_load(tmp_path):
    folder = save_llama(tmp_path / "tied", tie_word_embeddings=True)
    run("quantize", folder, tmp_path / "out", "--exclude", r"layers\.1\.mlp\.")
    bnb_model = load(
        folder,
        quantization_config=bnb_config("nf4", False, llm_int8_skip_modules=["lm_head", "model.layers.1.mlp"]),
        dtype=torch.bfloat16,
    )
    assert torch.equal(logits(load(tmp_path / "out")), logits(bnb_model))


def test_tensor_types_include_and_exclude_choose(llama, tmp_path):
    arguments = ["--tensor-type", "q_proj=fp4", "--tensor-type", "k_proj=fp32", "--exclude", "v_proj"]
    run("quantize", llama, tmp_path / "out", *arguments, "--include", "lm_head")
    weights = {w["name"]: w for w in run_json("inspect", tmp_path / "out")["weights"]}
    layer = "model.layers.0.self_attn."
    assert weights[layer + "q_proj.weight"]["format"] == "fp4"
    assert weights[layer + "k_proj.weight"]["format"] == "fp32"
    assert weights[layer + "v_proj.weight"]["format"] == "bf16"
    assert weights[layer + "o_proj.weight"]["format"] == "nf4"
    assert weights["lm_head.weight"]["format"] == "nf4"
    assert weights["model.embed_tokens.weight"]["format"] == "bf16"
    config = json.loads((tmp_path / "out/config.json").read_text())
    skipped = config["quantization_config"]["llm_int8_skip_modules"]
    assert layer + "k_proj" in skipped
    assert layer + "v_proj" in skipped
    assert layer + "o_proj" not in skipped


@pytest.mark.parametrize("kind", ["nf4", "int4"])
def test_a_packed_head_is_not_listed_as_dense(llama, tmp_path, kind):
    """transformers would start it at random: its tensors have other names."""
    options = ["--block-size", "32"] if kind == "int4" else []
    run("quantize", llama, tmp_path / "out", "--to", kind, "--include", "lm_head", *options)
    quantization = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert "lm_head" not in quantization["llm_int8_skip_modules" if kind == "nf4" else "ignore"]
    run("dequantize", tmp_path / "out", tmp_path / "dense")
    torch.testing.assert_close(
        logits(load(tmp_path / "out")), logits(load(tmp_path / "dense")), rtol=0.02, atol=0.02
    )


def test_options_of_another_format_are_refused(llama, tmp_path):
    for words in (["--compute-dtype", "fp16"], ["--block-size", "-1"]):
        message = run("quantize", llama, tmp_path / "out", "--to", "int4", *words, code=2).stderr
        assert " ".join(words[:1]) in message
        assert "18446744073709551615" not in message


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float32, "fp32")])
def test_dequantize_gives_the_values_of_bitsandbytes(llama, tmp_path, dtype, name):
    bnb_model = load(llama, quantization_config=bnb_config(), dtype=torch.bfloat16)
    bnb_model.save_pretrained(tmp_path / "packed")
    run("dequantize", tmp_path / "packed", tmp_path / "out", "--to", name)
    state = state_of(tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == {"bf16": "bfloat16", "fp32": "float32"}[name]
    packed = state_of(tmp_path / "packed")
    for key, value in state.items():
        if key + ".absmax" in packed:
            assert torch.equal(value, mg.from_bitsandbytes(packed, key).dequantize(dtype))
    dense = bnb_model.dequantize(dtype=torch.bfloat16)
    if dtype == torch.bfloat16:
        assert torch.equal(logits(load(tmp_path / "out")), logits(dense))


def test_refuses_what_is_quantised_already_unless_told(llama, tmp_path):
    run("quantize", llama, tmp_path / "once")
    message = run("quantize", tmp_path / "once", tmp_path / "twice", code=3).stderr
    assert "is already nf4" in message
    assert not (tmp_path / "twice").exists()
    run("quantize", tmp_path / "once", tmp_path / "twice", "--requantize", "--to", "fp4")
    assert "fp4" in run_json("inspect", tmp_path / "twice")["by_format"]
    assert "holds no packed weight" in run("dequantize", llama, tmp_path / "x", code=3).stderr


def test_a_dry_run_looks_at_the_target(llama, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("mine")
    for command in ("quantize", "dequantize"):
        source = llama if command == "quantize" else tmp_path / "nf4"
        dry = run(command, source, tmp_path / "out", "--dry-run", code=3)
        assert dry.stderr == run(command, source, tmp_path / "out", code=3).stderr
        run("quantize", llama, tmp_path / "nf4", "--force")


def test_dry_run_states_the_sizes_and_writes_nothing(llama, tmp_path):
    dry = run_json("quantize", llama, tmp_path / "out", "--double-quant", "--dry-run")
    assert not list(tmp_path.iterdir())
    wet = run_json("quantize", llama, tmp_path / "out", "--double-quant")
    assert {**dry, "dry_run": False, "seconds": wet["seconds"]} == wet
    assert wet["total"]["bytes_after"] == run_json("inspect", tmp_path / "out")["total"]["bytes"]


def test_output_does_not_depend_on_jobs_and_respects_the_shard_size(llama, tmp_path):
    for jobs in (1, 3):
        run("quantize", llama, tmp_path / str(jobs), "--jobs", jobs, "--max-shard-size", "100KB")
    names = sorted(file.name for file in (tmp_path / "1").iterdir())
    assert sum(name.startswith("model-") for name in names) > 1
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes(), name


def test_existing_output_and_output_in_the_source_are_refused(llama, tmp_path):
    out = tmp_path / "out"
    run("quantize", llama, out)
    before = (out / "model.safetensors").stat().st_ino
    run("quantize", llama, out, code=3)
    assert (out / "model.safetensors").stat().st_ino == before
    run("quantize", llama, out, "--to", "fp4", "--force")
    assert "fp4" in run_json("inspect", out)["by_format"]
    run("quantize", llama, llama, "--force", code=3)
    run("quantize", llama, llama / "inside", code=3)


def test_a_nan_is_named_and_nothing_is_left(llama, tmp_path):
    folder = save_llama(tmp_path / "bad")
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    message = run("quantize", folder, tmp_path / "out", code=3).stderr
    assert "model.layers.0.mlp.up_proj.weight': element 389 is nan" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]
    run("quantize", folder, tmp_path / "out", "--nonfinite", "saturate")


def test_wrong_options_are_exit_code_2(llama, tmp_path):
    for arguments in (
        ["--block-size", "65"],
        ["--to", "int3"],
        ["--tensor-type", "x=int3"],
        ["--include", "("],
        ["--max-shard-size", "x"],
        ["--jobs", "-1"],
    ):
        run("quantize", llama, tmp_path / "out", *arguments, code=2)
        assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """240 MB: long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("large")
    state = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(4096, 3670).bfloat16() for i in range(8)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_an_interrupt_leaves_nothing_behind(large, tmp_path):
    for delay in (0.01, 0.05, 0.1):
        command = [program(), "quantize", large, tmp_path / "out", "--jobs", "1"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        # Before the handler is there the signal ends the program; after the rename it is too late.
        assert process.returncode in (130, -signal.SIGINT, 0)
        if process.returncode != 0:
            assert not list(tmp_path.iterdir())


def test_the_bar_is_drawn_on_a_terminal_only(large, tmp_path):
    assert "%" not in run("quantize", large, tmp_path / "a").stderr
    for index, flags in enumerate(([], ["--quiet"])):
        parent, child = os.openpty()
        command = [program(), "quantize", large, tmp_path / f"b{index}", *flags]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=child)
        os.close(child)
        shown = b""
        while True:
            try:
                block = os.read(parent, 65536)
            except OSError:
                break
            shown += block
        assert process.wait() == 0
        os.close(parent)
        assert (b"/s" in shown and b"100 %" in shown) == (not flags)
        assert (shown == b"") == bool(flags)
