"""`monograph merge` onto int4, int8 and fp8 in groups of a row, and back into them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import monograph as mg
from support.merge_reference import adapter_on
from support.native_tool import run, run_json
from support.producer_groups import CASES, DTYPES, compressed
from support.quantised_merges import check, expected
from support.tiny_models import load, save_llama

pytest.importorskip("compressed_tensors")

DOWN, UP = "model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapter(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    adapter_on(load(llama, dtype=torch.float32), folder, torch.float32)  # q_proj and down_proj
    return folder


@pytest.fixture(scope="module", params=CASES)
def packed(request, llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / request.param
    options, case = CASES[request.param]
    run("quantize", llama, folder, *options)
    return options, case, folder


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def quantised(weight, case, format=None):
    code, block, symmetric = case
    rule = "default" if symmetric else "minmax"
    return mg.quantize(weight, format or code, block_size=block, rule=rule)


def zero_points(weight, case):
    """Signed, as floats [rows, groups]: by compressed-tensors, which the folder's are."""
    from compressed_tensors.quantization.utils import calculate_qparams

    from support.producer_groups import arguments

    groups = weight.reshape(weight.shape[0], -1, case[1] or weight.shape[1])
    return calculate_qparams(groups.amin(-1), groups.amax(-1), arguments(*case))[1].float()


def nearest(source, merged, case):
    """The nearest values on the scales of the base; a group that leaves them gets its own. And which do."""
    code, block, symmetric = case
    base = quantised(source, case)
    block = block or source.shape[1]
    scale = base.scales[0].view(source.dtype).reshape(source.shape[0], -1).float()
    zero = torch.zeros_like(scale) if symmetric else zero_points(source, case)
    low, high, half = {"int4": (-8, 7, 0.5), "int8": (-128, 127, 0.5), "fp8": (-448, 448, 16)}[code]
    wide, zeros = scale.repeat_interleave(block, 1), zero.repeat_interleave(block, 1)
    numbers, before = (values.float() / wide + zeros for values in (merged, base.dequantize(source.dtype)))
    # Values of the base that are rounded to its type may lie further out.
    first, last = before.reshape(*scale.shape, block).aminmax(dim=-1)
    first, last = first.clamp(max=low - half), last.clamp(min=high + half)
    of_groups = numbers.reshape(*scale.shape, block)
    fits = (of_groups.amin(-1) >= first) & (of_groups.amax(-1) <= last)
    codes = numbers.clamp(low, high)
    codes = codes.to(torch.float8_e4m3fn).float() if code == "fp8" else codes.round()
    own = quantised(merged.float(), case, base.format.name).dequantize(torch.float32)
    return torch.where(fits.repeat_interleave(block, 1), (codes - zeros) * wide, own), fits


def save_lora(folder, rows, cols):
    """On `a.weight`."""
    folder.mkdir()
    factors = {"A": torch.randn(4, cols), "B": torch.randn(rows, 4) * 2e-4}
    prefix = "base_model.model.a.lora_{}.weight"
    save_file({prefix.format(k): f for k, f in factors.items()}, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["a"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return factors


def merging(folder, adapter, *options):
    return ["merge", folder, "--adapter", adapter, "--base", "dequantized", "--warn-below", "0", *options]


def test_onto_it_from_a_dense_base_and_back(llama, adapter, packed, tmp_path):
    options, case, folder = packed
    source = tensors_of(llama)
    linears = {key: value for key, value in source.items() if key.endswith("_proj.weight")}
    trained_on = {key: quantised(value, case).dequantize(torch.bfloat16) for key, value in linears.items()}
    wanted = expected(trained_on, load_file(adapter / "adapter_model.safetensors"), 2.0)
    run(*merging(folder, adapter, "--out", tmp_path / "out"))
    check(tmp_path / "out", wanted)
    # The same from the dense base, loaded so in training.
    loaded = [option.replace("--", "--as-").replace("--as-to", "--as") for option in options]
    run(*merging(llama, adapter, *loaded, "--out", tmp_path / "as"))
    first, second = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "as")
    assert all(torch.equal(first[key], second[key]) for key in first)
    # And stored packed again, by default in the groups of the base, to the nearest of them.
    run(*merging(folder, adapter, "--to", case[0], "--rounding", "nearest", "--out", tmp_path / "packed"))
    again, before = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "packed", folder))
    assert again["quantization_config"] == before["quantization_config"]
    run("dequantize", tmp_path / "packed", tmp_path / "back", "--to", "fp32")
    back = tensors_of(tmp_path / "back")
    kept = total = 0
    for key in (key for key in linears if "q_proj" in key or "down_proj" in key):
        values, fits = nearest(source[key], torch.from_numpy(wanted[key]), case)
        assert torch.equal(back[key], values), key
        kept, total = kept + int(fits.sum()), total + fits.numel()
    assert 0 < kept < total  # both kinds of groups


def test_what_the_adapter_does_not_change_keeps_its_bytes(llama, adapter, packed, tmp_path):
    options, case, folder = packed
    loaded = [option.replace("--", "--as-").replace("--as-to", "--as") for option in options]
    for name, merge in (("packed", merging(folder, adapter)), ("as", merging(llama, adapter, *loaded))):
        run(*merge, "--to", case[0], "--rounding", "adapter", "--out", tmp_path / name)
        before, after = tensors_of(folder), tensors_of(tmp_path / name)
        assert after.keys() == before.keys()
        changed = {key.split(".weight")[0] for key in before if not torch.equal(before[key], after[key])}
        modules = ("self_attn.q_proj", "mlp.down_proj")
        assert changed == {f"model.layers.{i}.{module}" for i in range(2) for module in modules}


@pytest.mark.parametrize("format", ["int4", "nf4", "fp8"])
def test_layers_that_the_base_keeps_in_16_bits_stay_so(llama, adapter, format, tmp_path):
    groups = ["--block-size", "64"] if format == "int4" else []
    run("quantize", llama, tmp_path / "base", "--to", format, *groups, "--exclude", r"layers\.1\.mlp")
    report = run_json(*merging(tmp_path / "base", adapter, "--to", format, "--out", tmp_path / "out"))
    assert "3 weights of linear layers are not packed in the base and stay so" in report["notes"]
    before, after = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "out")
    assert after.keys() == before.keys()
    plain = [key for key in before if "layers.1.mlp" in key]
    assert [after[key].dtype for key in plain] == [torch.bfloat16] * 3
    assert [key for key in plain if not torch.equal(before[key], after[key])] == [DOWN]  # the adapter's
    check(
        tmp_path / "out",
        expected({DOWN: before[DOWN]}, load_file(adapter / "adapter_model.safetensors"), 2.0),
    )
    settings = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("base", "out")]
    assert settings[0]["quantization_config"] == settings[1]["quantization_config"]


def test_feedback_keeps_more_of_the_change_than_nearest(adapter, packed, tmp_path):
    """Along the adapter, as for the other formats: docs/explain/merge.md."""
    options, case, folder = packed
    errors = {}
    for rounding in ("nearest", "adapter"):
        out = tmp_path / f"out-{rounding}"
        report = run_json(*merging(folder, adapter, *options, "--rounding", rounding, "--all", "--out", out))
        assert len(report["weights"]) == 4
        errors[rounding] = max(row["error_along_adapter"] for row in report["weights"])
        assert run_json("verify", out)["findings"] == []
    assert errors["adapter"] < 0.25 * errors["nearest"]
    default = run_json(*merging(folder, adapter, *options, "--out", tmp_path / "default"))["rounding"]
    assert default == ("adapter" if case[0] == "int4" else "nearest")


@pytest.mark.slow
def test_transformers_and_the_producer_decode_the_merged_folder_to_our_bits(adapter, packed, tmp_path):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    options, _, folder = packed
    out = tmp_path / "out"
    run(*merging(folder, adapter, *options, "--rounding", "adapter", "--out", out))
    theirs = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    model = mg.from_pretrained(out)
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, mg.nn.QuantLinear)}
    assert len(layers) == 14
    for path, layer in layers.items():
        assert torch.equal(layer.dequantize(torch.bfloat16), theirs.get_submodule(path).weight), path


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_have_the_type_of_the_weight_and_the_producer_reads_padded_rows(dtype, tmp_path):
    """Rows of 500, rows that share words of zero points; the tensors of one layer, decompressed by itself."""
    torch.manual_seed(0)
    weight = (torch.randn(133, 500) * 0.02).to(dtype)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    save_file({"a.weight": weight}, base / "model.safetensors")
    factors = save_lora(adapter, 133, 500)
    for case in (("int4", 20, False), ("int4", 0, True), ("int8", 0, False), ("fp8", 0, True)):
        code, block, symmetric = case
        to = ["--to", code, "--block-size", block, *([] if symmetric else ["--asymmetric"])]
        folder = tmp_path / f"{code}-{block}"
        folder.mkdir()
        run("quantize", base, folder / "packed", *to)
        for origin, jobs in (("packed", 1), ("packed", 3), ("base", 1)):
            out = folder / f"{origin}-{jobs}"
            from_folder = base if origin == "base" else folder / "packed"
            how = "original" if origin == "base" else "dequantized"
            more = [*to, "--rounding", "adapter", "--jobs", jobs, "--out", out]
            run("merge", from_folder, "--adapter", adapter, "--base", how, *more)
        one, three, dense = (tensors_of(folder / name) for name in ("packed-1", "packed-3", "base-1"))
        assert all(torch.equal(one[key].view(torch.uint8), three[key].view(torch.uint8)) for key in one)
        for found, name in ((one, "packed-1"), (dense, "base-1")):
            assert found["a.weight_scale"].dtype == dtype
            made = compressed(weight, *case)
            state = {key.removeprefix("a."): tensor for key, tensor in found.items()}
            theirs = made.compressor.decompress(state, made.scheme)["weight"]
            run("dequantize", folder / name, folder / f"{name}-wide")
            ours = tensors_of(folder / f"{name}-wide")["a.weight"]
            assert ours.dtype == dtype
            assert torch.equal(ours, theirs), (case, name)
            meant = weight.double() + factors["B"].double() @ factors["A"].double()
            snr = (meant.norm() / (ours.double() - meant).norm()).log10() * 20
            assert snr > {"int4": 12, "int8": 30, "fp8": 22}[code]


@pytest.mark.parametrize("symmetric", [True, False])
def test_an_int_quantized_base_becomes_pack_quantized_with_the_same_codes(symmetric, tmp_path):
    """INT8 as compressed-tensors stores it for W8A8: signed bytes; the merged folder has 128 added."""
    torch.manual_seed(0)
    base, out = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    state = {}
    for name in ("a", "b"):
        packed = quantised((torch.randn(12, 64) * 0.02).bfloat16(), ("int8", 0, symmetric))
        state[f"{name}.weight"] = (packed.values.reshape(12, 64) ^ 128).view(torch.int8)
        state[f"{name}.weight_scale"] = packed.scales[0].view(torch.bfloat16).reshape(12, 1)
        if not symmetric:
            words = packed.scales[1].reshape(3, 1, 4).transpose(1, 2).reshape(12, 1)
            state[f"{name}.weight_zero_point"] = (words ^ 128).view(torch.int8)
    save_file(state, base / "model.safetensors")
    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    (base / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_lora(tmp_path / "one", 12, 64)
    run(*merging(base, tmp_path / "one"), "--to", "int8", "--out", out)
    found = tensors_of(out)
    assert ("b.weight_zero_point" in found) != symmetric
    codes = found["b.weight_packed"].view(torch.uint8) ^ 128
    assert torch.equal(codes.view(torch.int8), state["b.weight"])
    for folder in (base, out):
        run("dequantize", folder, tmp_path / f"{folder.name}-wide")
    before, after = (tensors_of(tmp_path / f"{folder.name}-wide") for folder in (base, out))
    assert torch.equal(before["b.weight"], after["b.weight"])
    assert not torch.equal(before["a.weight"], after["a.weight"])


def test_a_base_of_two_group_sizes_needs_one_by_name(tmp_path):
    torch.manual_seed(0)
    base, both = tmp_path / "base", tmp_path / "both"
    state = {}
    for name, block in (("a", 16), ("b", 32)):
        folder = tmp_path / name
        folder.mkdir()
        save_file({f"{name}.weight": torch.randn(8, 64)}, folder / "model.safetensors")
        run("quantize", folder, tmp_path / f"{name}4", "--to", "int4", "--block-size", block)
        state |= tensors_of(tmp_path / f"{name}4")
    base.mkdir()
    save_file(state, base / "model.safetensors")
    save_lora(tmp_path / "one", 8, 64)
    to = [*merging(base, tmp_path / "one"), "--to", "int4", "--out", both]
    assert "groups of 16 and of 32) is required" in run(*to, code=2).stderr
    run(*to, "--block-size", "32")
    found = tensors_of(both)
    assert found["a.weight_scale"].shape == found["b.weight_scale"].shape == (8, 2)
    assert torch.equal(found["b.weight_packed"], state["b.weight_packed"])


def test_what_cannot_be_is_refused_by_name(llama, adapter, packed, tmp_path):
    _, case, folder = packed
    out = tmp_path / "out"

    def refused(base, *options, code=2):
        done = run(*merging(base, adapter, *options), "--out", out, code=code)
        assert not out.exists()
        return done.stderr

    assert "--asymmetric: fp8 has no zero points" in refused(folder, "--to", "fp8", "--asymmetric")
    assert "--asymmetric: nf4 has no zero points" in refused(folder, "--to", "nf4", "--asymmetric")
    assert "--as-asymmetric: fp8 has no zero points" in refused(llama, "--as", "fp8", "--as-asymmetric")
    wrong = refused(llama, "--as", "fp8", "--as-block-size", "64")
    assert "--as-block-size 64: wanted 0, the row, the only one of fp8" in wrong
    double = refused(llama, "--as", "int8", "--as-double-quant")
    assert "--as-double-quant: int8 has no double quantisation" in double
    for options in (["--block-size", "32"], ["--to", "bf16", "--asymmetric"], ["--double-quant"]):
        name = next(option for option in reversed(options) if option.startswith("--"))
        assert f"{name}: is for --to a packed format" in refused(folder, *options)
    for options in (["--as-block-size", "32"], ["--as-asymmetric"], ["--as-double-quant"]):
        assert f"{options[0]}: is for --as, which says how" in refused(folder, *options)
    message = refused(folder, "--to", "int4", "--block-size", "128", code=3)
    assert "rows have 192 elements, format int4-bf16 wants a multiple of 128" in message
    stack, one = tmp_path / "stack", tmp_path / "one"
    stack.mkdir()
    experts = {"m.mlp.experts.down_proj": torch.ones(2, 32, 64), "a.weight": torch.ones(32, 64)}
    save_file(experts, stack / "model.safetensors")
    (stack / "config.json").write_text(json.dumps({"hidden_size": 32}))
    save_lora(one, 32, 64)
    more = ["--to", case[0], "--block-size", "0", "--experts", "stack", "--out", out]
    message = run("merge", stack, "--adapter", one, "--base", "original", *more, code=3).stderr
    assert "'m.mlp.experts.down_proj'" in message
    assert "wants one" in message
