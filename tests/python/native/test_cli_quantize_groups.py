"""`monograph quantize --to int4, int8, fp8`: compressed-tensors' tensors and config, read back by itself."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import monograph as mg
from support.native_tool import run, run_json
from support.producer_groups import CASES, DTYPES, compressed
from support.tiny_models import logits, save_llama

pytest.importorskip("compressed_tensors")

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=CASES)
def packed(request, llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / request.param
    options, case = CASES[request.param]
    run("quantize", llama, folder, *options)
    return options, case, folder


def ours(weight, case):
    code, block, symmetric = case
    return mg.quantize(weight, code, block_size=block, rule="default" if symmetric else "minmax")


def test_tensors_are_those_of_the_producer(llama, packed):
    _, case, folder = packed
    source, found = load_file(llama / "model.safetensors"), load_file(folder / "model.safetensors")
    linears = [key for key in source if key.endswith("_proj.weight")]
    assert len(linears) == 14
    for key in linears:
        wanted = compressed(source.pop(key), *case).tensors
        wanted.pop("weight_zero_point") if case[2] and "weight_zero_point" in wanted else None
        for part, tensor in wanted.items():
            got = found.pop(f"{key.removesuffix('.weight')}.{part}")
            assert got.dtype == tensor.dtype
            assert torch.equal(got.view(torch.uint8), tensor.contiguous().view(torch.uint8)), (key, part)
    assert found.keys() == source.keys()  # everything else as it was
    assert all(torch.equal(found[key], source[key]) for key in found)


def test_inspect_verify_dequantize_and_diff_agree(llama, packed, tmp_path):
    _, case, folder = packed
    assert run_json("inspect", folder)["by_format"][case[0]]["tensors"] == 14
    assert run_json("verify", folder)["findings"] == []
    run("dequantize", folder, tmp_path / "bf16")
    back, source = (load_file(f / "model.safetensors") for f in (tmp_path / "bf16", llama))
    assert back.keys() == source.keys()
    for key in (UP, DOWN):
        assert torch.equal(back[key], ours(source[key], case).dequantize(torch.bfloat16))
        assert torch.equal(back[key], compressed(source[key], *case).decompressed())
    rows = {row["name"]: row for row in run_json("diff", folder, llama, code=4)["weights"]}
    assert rows[UP]["format_a"] == case[0]
    assert rows[UP]["snr_db"] > {"int4": 15, "int8": 35, "fp8": 25}[case[0]]
    assert run_json("diff", folder, tmp_path / "bf16", "--tolerance", 2**-8)["mismatches"] == 0


def test_the_config_is_the_producers(packed):
    from compressed_tensors.quantization import QuantizationConfig

    _, (code, block, symmetric), folder = packed
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(config)
    group = read.config_groups["group_0"]
    weights = group.weights
    assert (weights.num_bits, str(weights.type)) == (
        4 if code == "int4" else 8,
        "float" if code == "fp8" else "int",
    )
    assert weights.symmetric == symmetric
    assert (str(weights.strategy), weights.group_size) == (("group", block) if block else ("channel", None))
    assert group.input_activations is None
    assert read.format == group.format == ("float-quantized" if code == "fp8" else "pack-quantized")
    assert read.ignore == ["lm_head"]


@pytest.mark.slow
def test_transformers_and_the_producer_decode_it_to_our_bits(packed):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    _, _, folder = packed
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    model = mg.from_pretrained(folder)
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, mg.nn.QuantLinear)}
    assert len(layers) == 14
    for path, layer in layers.items():
        weight = theirs.get_submodule(path).weight
        assert torch.equal(layer.dequantize(torch.bfloat16), weight), path
    assert torch.isfinite(logits(model)).all()


def test_threads_and_pieces_do_not_change_the_bytes(tmp_path):
    """Weights of several pieces, padded rows, every type of the source, zeros that share words."""
    torch.manual_seed(0)
    for dtype in DTYPES:
        weight = torch.randn(8403, 500).to(dtype)
        weight[17] = 0.0
        folder = tmp_path / str(dtype)
        folder.mkdir()
        save_file({"a.weight": weight}, folder / "model.safetensors")
        for case in (("int4", 20, False), ("int4", 0, True), ("int8", 0, False), ("fp8", 0, True)):
            want = ours(weight, case)
            code, block, symmetric = case
            more = [] if symmetric else ["--asymmetric"]
            for jobs in (1, 3):
                out = tmp_path / f"{dtype}-{code}-{symmetric}-{jobs}"
                run("quantize", folder, out, "--to", code, "--block-size", block, "--jobs", jobs, *more)
                found = load_file(out / "model.safetensors")
                values = found["a.weight" if code == "fp8" else "a.weight_packed"]
                parts = [
                    values,
                    found["a.weight_scale"],
                    *(() if symmetric else (found["a.weight_zero_point"],)),
                ]
                assert parts[1].dtype == dtype
                for part, tensor in zip((want.values, *want.scales), parts, strict=True):
                    assert torch.equal(part.reshape(-1), tensor.reshape(-1).view(torch.uint8)), (case, dtype)
                if code != "fp8":
                    assert found["a.weight_shape"].tolist() == [8403, 500]


def test_what_cannot_be_stored_is_refused(llama, packed, tmp_path):
    _, case, folder = packed
    out = tmp_path / "out"

    def refused(*arguments, code=2):
        done = run("quantize", *arguments, code=code)
        assert not out.exists()
        return done.stderr

    message = refused(llama, out, "--to", "int4", code=3)
    assert "rows have 192 elements, format int4-bf16 wants a multiple of 128" in message
    assert "_proj.weight'" in message
    wrong = refused(llama, out, "--to", "fp8", "--block-size", "64")
    assert "--block-size 64: wanted 0, the row, the only one of fp8" in wrong
    assert "--asymmetric: fp8 has no zero points" in refused(llama, out, "--to", "fp8", "--asymmetric")
    assert "--asymmetric: nf4 has no zero points" in refused(llama, out, "--asymmetric")
    assert "int8 has no double quantisation" in refused(llama, out, "--to", "int8", "--double-quant")
    row = ["--to", "int8", "--tensor-type", "down_proj=int4", "--block-size", "0"]
    assert "no loader knows such a mixture" in refused(llama, out, *row, code=3)
    assert f"is already {case[0]}" in refused(folder, out, "--to", "int4", "--block-size", "0", code=3)
    kept = ["--to", case[0], "--block-size", "0", "--requantize", "--exclude", "down_proj"]
    assert "no loader knows such a mixture" in refused(folder, out, *kept, code=3)
    odd = tmp_path / "odd"
    odd.mkdir()
    for bad in ("nan", "inf", "-inf"):
        weight = torch.ones(4, 32)
        weight[2, 5] = float(bad)
        save_file({"a.weight": weight}, odd / "model.safetensors")
        assert f"element 69 is {bad}" in refused(odd, out, "--to", case[0], "--block-size", "0", code=3)
    save_file({"experts": torch.ones(2, 4, 32)}, odd / "model.safetensors")
    message = refused(odd, out, "--to", "int8", "--include", "experts", code=3)
    assert "'experts'" in message
    assert "wants one" in message
