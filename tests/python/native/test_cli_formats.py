"""The native tool on MXFP4, MXFP8, NVFP4 and FP8 blocks, every command of it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import monograph as mg
from support.merge_reference import adapter_on
from support.native_tool import run, run_json
from support.quantised_merges import check, expected
from support.tiny_models import load, logits, save_llama

# The tool's name, ours, and the tensors of a weight in place of ".weight".
FORMATS = {
    "mxfp4": ("mxfp4", [".weight_packed", ".weight_scale"]),
    "mxfp8": ("mxfp8", [".weight", ".weight_scale"]),
    "nvfp4": ("nvfp4-divide", [".weight_packed", ".weight_scale", ".weight_global_scale"]),
    "fp8-block": ("fp8-block", [".weight", ".weight_scale_inv"]),
}
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """192 rows and columns: an FP8 block and a half."""
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=FORMATS)
def packed(request, llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / request.param
    run("quantize", llama, folder, "--to", request.param)
    return request.param, folder


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).reshape(-1)


def test_the_bytes_are_those_of_our_operator(llama, packed):
    name, folder = packed
    source, found = load_file(llama / "model.safetensors"), load_file(folder / "model.safetensors")
    linears = [key for key in source if key.endswith("_proj.weight")]
    assert len(linears) == 14
    for key in linears:
        ours, suffixes = FORMATS[name]
        weight = mg.quantize(source.pop(key), ours)
        stored = [found.pop(key.removesuffix(".weight") + suffix) for suffix in suffixes]
        for want, got in zip((weight.values, *weight.scales), stored, strict=True):
            assert torch.equal(raw(want), raw(got)), key
    assert found.keys() == source.keys()  # everything else as it was
    assert all(torch.equal(found[key], source[key]) for key in found)


def test_inspect_verify_dequantize_and_diff_agree(llama, packed, tmp_path):
    name, folder = packed
    report = run_json("inspect", folder)
    assert report["by_format"][name]["tensors"] == 14
    assert run_json("verify", folder)["findings"] == []
    run("dequantize", folder, tmp_path / "bf16")
    back, source = (load_file(f / "model.safetensors") for f in (tmp_path / "bf16", llama))
    assert back.keys() == source.keys()
    for key in (UP, DOWN):
        assert torch.equal(back[key], mg.quantize(source[key], FORMATS[name][0]).dequantize(torch.bfloat16))
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert torch.isfinite(logits(load(tmp_path / "bf16"))).all()
    # By value: the decoded folder is the packed one rounded to bf16, and the source is close to it.
    rows = {row["name"]: row for row in run_json("diff", folder, llama, code=4)["weights"]}
    assert rows[UP]["format_a"] == name
    floor = 25 if name in ("mxfp8", "fp8-block") else 15
    assert rows[UP]["snr_db"] > floor
    assert run_json("diff", folder, tmp_path / "bf16", "--tolerance", 2**-8)["mismatches"] == 0


def test_the_config_is_what_its_reader_expects(packed):
    name, folder = packed
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    if name == "fp8-block":
        from transformers import FineGrainedFP8Config

        read = FineGrainedFP8Config.from_dict(config)
        assert read.weight_block_size == (128, 128) or list(read.weight_block_size) == [128, 128]
        assert read.modules_to_not_convert == ["lm_head"]
        return
    from compressed_tensors.quantization import QuantizationConfig

    read = QuantizationConfig.model_validate(config)
    weights = read.config_groups["group_0"].weights
    assert weights.num_bits == (8 if name == "mxfp8" else 4)
    assert weights.group_size == (16 if name == "nvfp4" else 32)
    assert read.config_groups["group_0"].input_activations is None
    assert read.ignore == ["lm_head"]
    assert str(read.format).startswith(name)


def test_from_pretrained_takes_it_as_it_is(packed):
    name, folder = packed
    ours, suffixes = FORMATS[name]
    found = load_file(folder / "model.safetensors")
    model = mg.from_pretrained(folder)
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, mg.nn.QuantLinear)}
    assert len(layers) == 14
    for path, layer in layers.items():
        assert layer.format.name == ours
        stored = [found[path + suffix] for suffix in suffixes]
        for got, want in zip((layer.values, *layer.scales), stored, strict=True):
            assert torch.equal(raw(got), raw(want)), path
    assert torch.equal(model.lm_head.weight, found["lm_head.weight"])


def test_merge_onto_the_dequantised_weights(llama, packed, tmp_path):
    name, folder = packed
    model = load(llama, dtype=torch.float32)
    adapter_on(model, tmp_path / "adapter", torch.float32, target_modules=["q_proj", "down_proj"])
    source = load_file(llama / "model.safetensors")
    linears = {key: value for key, value in source.items() if key.endswith("_proj.weight")}
    trained_on = {
        key: mg.quantize(value, FORMATS[name][0]).dequantize(torch.bfloat16) for key, value in linears.items()
    }
    wanted = expected(trained_on, load_file(tmp_path / "adapter" / "adapter_model.safetensors"), 2.0)
    arguments = ["--adapter", tmp_path / "adapter", "--base", "dequantized", "--warn-below", "0", "--out"]
    run("merge", folder, *arguments, tmp_path / "out")
    check(tmp_path / "out", wanted)
    # The same from the dense base, loaded so in training; and stored packed again.
    run("merge", llama, *arguments, tmp_path / "as", "--as", name)
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "as"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    run("merge", folder, *arguments, tmp_path / "packed", "--to", name, "--rounding", "nearest")
    run("dequantize", tmp_path / "packed", tmp_path / "back", "--to", "fp32")
    back = load_file(tmp_path / "back" / "model.safetensors")
    for key in (UP, DOWN):
        merged = torch.from_numpy(wanted[key]).float()
        assert torch.equal(back[key], mg.quantize(merged, FORMATS[name][0]).dequantize(torch.float32)), key
    method = "fp8" if name == "fp8-block" else "compressed-tensors"
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == method


def test_threads_and_pieces_do_not_change_the_bytes(tmp_path):
    """A weight of several pieces, its largest magnitude in the last one."""
    torch.manual_seed(0)
    weight = torch.randn(2100, 4096).bfloat16()
    weight[-1, -1] = 1000.0
    (tmp_path / "in").mkdir()
    save_file({"a.weight": weight}, tmp_path / "in" / "model.safetensors")
    for name, (ours, suffixes) in FORMATS.items():
        want = mg.quantize(weight, ours)
        for jobs in (1, 3):
            out = tmp_path / f"{name}-{jobs}"
            run("quantize", tmp_path / "in", out, "--to", name, "--jobs", jobs)
            found = load_file(out / "model.safetensors")
            for part, suffix in zip((want.values, *want.scales), suffixes, strict=True):
                assert torch.equal(raw(part), raw(found["a" + suffix])), (name, suffix)


def test_what_cannot_be_stored_is_refused(llama, tmp_path):
    out = tmp_path / "out"

    def refused(*arguments, code=2):
        done = run("quantize", *arguments, code=code)
        assert not out.exists()
        return done.stderr

    assert "--block-size 64: wanted 32, the only one of mxfp4" in refused(
        llama, out, "--to", "mxfp4", "--block-size", "64"
    )
    assert "nvfp4 has no double quantisation" in refused(llama, out, "--to", "nvfp4", "--double-quant")
    mixture = refused(llama, out, "--to", "mxfp4", "--tensor-type", "down_proj=mxfp8", code=3)
    assert "no loader knows such a mixture" in mixture
    odd = tmp_path / "odd"
    odd.mkdir()
    save_file({"a.weight": torch.ones(4, 40)}, odd / "model.safetensors")
    message = refused(odd, out, "--to", "mxfp4", code=3)
    assert "'a.weight'" in message
    assert "rows have 40 elements, format mxfp4 wants a multiple of 32" in message
    save_file({"a.weight": torch.full((4, 32), float("nan"))}, odd / "model.safetensors")
    for name in FORMATS:
        assert "element 0 is nan" in refused(odd, out, "--to", name, code=3)
    save_file({"experts": torch.ones(2, 4, 32)}, odd / "model.safetensors")
    message = refused(odd, out, "--to", "mxfp4", "--include", "experts", code=3)
    assert "matrices with a name X.weight only" in message


@pytest.mark.parametrize("name", ["nvfp4", "fp8-block"])
def test_verify_finds_scales_that_lost_their_block(llama, tmp_path, name):
    folder = tmp_path / "packed"
    run("quantize", llama, folder, "--to", name)
    state = load_file(folder / "model.safetensors")
    scale = UP.removesuffix(".weight") + FORMATS[name][1][1]
    state[scale].view(torch.uint8)[1] = 0
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (finding,) = run_json("verify", folder, code=1)["findings"]
    per_row = 8 if name == "nvfp4" else 1
    assert finding == {
        "weight": UP,
        "part": "scale",
        "what": "zero scale",
        "count": per_row,
        "first": per_row,
    }


@pytest.mark.parametrize("name", FORMATS)
def test_transformers_loads_it_to_the_same_logits(tmp_path, name):
    """Whole FP8 blocks: transformers itself is wrong for others."""
    from transformers import CompressedTensorsConfig, FineGrainedFP8Config

    base = save_llama(tmp_path / "base", intermediate_size=256)
    run("quantize", base, tmp_path / "packed", "--to", name)
    run("dequantize", tmp_path / "packed", tmp_path / "bf16")
    fp8 = name == "fp8-block"
    how = FineGrainedFP8Config(dequantize=True) if fp8 else CompressedTensorsConfig(run_compressed=False)
    reference = load(tmp_path / "packed", dtype=torch.bfloat16, quantization_config=how)
    ours = load(tmp_path / "bf16", dtype=torch.bfloat16)
    assert not torch.equal(logits(reference), logits(load(base)))
    assert torch.equal(logits(reference), logits(ours))
