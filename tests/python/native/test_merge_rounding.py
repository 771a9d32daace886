"""`monograph merge --rounding` and `quantize --calibration` against GPTQ with a dense matrix, in float64."""

import json
import math
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.native_tool import run, run_json

MODULE = "model.layers.0.mlp.up_proj"
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0], dtype=np.float32,
)  # fmt: skip
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
FORMATS = {"nf4": ["nf4"], "nf4-double": ["nf4", "--double-quant"], "nvfp4": ["nvfp4"], "mxfp4": ["mxfp4"]}
INT4 = {"int4": ["int4"], "int4-32": ["int4", "--block-size", "32", "--asymmetric"]}
INT4["int4-row"] = ["int4", "--block-size", "0"]
GROUPS = INT4 | {"int8": ["int8"], "fp8": ["fp8"]}


def save_base(folder, rows=96, cols=256, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir()
    weight = (torch.randn(rows, cols, generator=generator) * 0.02).to(dtype)
    save_file({f"{MODULE}.weight": weight}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return weight


def save_adapter(folder, weight, strength, rank=8, seed=1, **more):
    """A LoRA whose change is `strength` of the weight; its singular values fall."""
    generator = torch.Generator().manual_seed(seed)
    rows, cols = weight.shape
    a = torch.randn(rank, cols, generator=generator)
    b = torch.randn(rows, rank, generator=generator) / torch.arange(1, rank + 1).sqrt()
    b *= strength * weight.float().norm() / (b @ a).norm()
    folder.mkdir()
    prefix = f"base_model.model.{MODULE}."
    tensors = {prefix + "lora_A.weight": a, prefix + "lora_B.weight": b}
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["up_proj"]}
    if more.get("use_dora"):
        norms = weight.double().norm(dim=1)
        scale = 1 + 0.02 * torch.randn(rows, generator=generator)
        tensors[prefix + "lora_magnitude_vector"] = (norms * scale).float()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings | more))
    return b.double().numpy() @ a.double().numpy()


def save_calibration(file, cols, rows=24, seed=2, module=MODULE, **metadata):
    """Inputs with a few strong directions and channels; what the sketch does not hold is in the diagonal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * rows, cols, generator=generator) * (
        1 + 4 * torch.rand(cols, generator=generator) ** 4
    )
    _, s, v = torch.linalg.svd(x / math.sqrt(len(x)), full_matrices=False)
    sketch = (s[:rows, None] * v[:rows]).contiguous()
    tensors = {f"{module}.sketch": sketch, f"{module}.diagonal": x.square().mean(0)}
    save_file(tensors, file, {"monograph.calibration": "1", "monograph.tokens": str(len(x))} | metadata)
    return tensors


def group_zeros(words, rows):
    """Packed along the rows, eight in a word, the first in the lowest bits: signed."""
    fields = (words.numpy().view(np.uint32)[:, None] >> np.arange(0, 32, 4)[:, None]) & 15
    return fields.reshape(-1, words.shape[1])[:rows].astype(np.float32) - 8


def codes_and_scales(folder, kind):
    """Codes and fp32 scales of each element, as the formats' own pages define them; zero points or 0."""
    if kind not in GROUPS:
        return *float_codes(folder, kind), np.float32(0)
    tensors = load_file(folder / "model.safetensors")
    name, scales = f"{MODULE}.weight", tensors[f"{MODULE}.weight_scale"].numpy()
    if kind == "fp8":
        codes = tensors[name].view(torch.uint8).numpy()
    else:
        codes = tensors[f"{name}_packed"].view(torch.uint8).numpy()
        if kind != "int8":
            codes = np.stack([codes & 15, codes >> 4], 2).reshape(len(codes), -1)
    zeros = np.zeros_like(scales)
    if f"{name}_zero_point" in tensors:
        zeros = group_zeros(tensors[f"{name}_zero_point"], len(scales))
    block = codes.shape[1] // scales.shape[1]
    return codes, np.repeat(scales, block, 1), np.repeat(zeros, block, 1)


def float_codes(folder, kind):
    tensors = load_file(folder / "model.safetensors")
    name = f"{MODULE}.weight"
    if kind.startswith("nf4"):
        state = json.loads(bytes(tensors[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
        shape, absmax = state["shape"], tensors[f"{name}.absmax"].numpy()
        if kind == "nf4-double":
            groups = np.repeat(tensors[f"{name}.nested_absmax"].numpy(), 256)[: absmax.size]
            absmax = tensors[f"{name}.nested_quant_map"].numpy()[absmax] * groups
            absmax = absmax + np.float32(state["nested_offset"])
        packed = tensors[name].numpy().reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], 1)
        return codes.reshape(shape), np.repeat(absmax, 64).reshape(shape)
    packed = tensors[f"{name}_packed"].numpy()
    codes = np.stack([packed & 15, packed >> 4], 2).reshape(len(packed), -1)
    stored = tensors[f"{name}_scale"]
    if kind == "mxfp4":
        scales = np.exp2(stored.numpy().astype(np.float32) - 127)
        return codes, np.repeat(scales, 32, 1)
    scales = stored.float().numpy()
    return codes, np.repeat(scales / tensors[f"{name}_global_scale"].numpy(), 16, 1)


def gptq(target, scales, zeros, values, h):
    """GPTQ as published, with Cholesky's factor of the inverse: the value of each code."""
    w, q = target.copy(), np.empty_like(target)
    u = np.linalg.cholesky(np.linalg.inv(h)).T
    bounds = (values[1:].astype(np.float64) + values[:-1]) / 2
    zeros = np.broadcast_to(zeros, target.shape)
    for i in range(w.shape[1]):
        value = values[np.searchsorted(bounds, w[:, i] / scales[:, i] + zeros[:, i])] - zeros[:, i]
        q[:, i] = value * scales[:, i]  # fp32, as a model reads it
        w[:, i:] -= ((w[:, i] - q[:, i]) / u[i, i])[:, None] * u[i, i:]
    return q


def adapter_columns(change, rank, mu):
    _, s, v = np.linalg.svd(change, full_matrices=False)
    return v[:rank].T * (s[:rank] / s[0]) * math.sqrt(mu * change.shape[1] / rank)


def input_terms(calibration):
    sketch, diagonal = (t.double().numpy() for t in calibration.values())
    mean = diagonal.mean()
    sketch = sketch / math.sqrt(mean)
    return sketch.T, np.maximum(diagonal / mean - (sketch**2).sum(0), 0) + 0.01


def values_of(kind):
    """By the stored code."""
    if kind.startswith(("nf4", "int4")):
        return NF4 if kind.startswith("nf4") else np.arange(-8, 8, dtype=np.float32)
    return {"int8": np.arange(-128, 128, dtype=np.float32), "fp8": E4M3}.get(kind, E2M1)


def share_equal(folder, kind, target, h):
    codes, scales, zeros = codes_and_scales(folder, kind)
    values = values_of(kind)
    found = (values[codes] - zeros) * scales
    ascending = np.unique(values[np.isfinite(values)])
    return (found == gptq(target, scales, zeros, ascending, h)).mean()


@pytest.mark.parametrize("kind", FORMATS | GROUPS)
def test_codes_are_those_of_dense_gptq(tmp_path, kind):
    """Along the adapter, along inputs too, and, of `quantize`, along inputs alone."""
    weight = save_base(tmp_path / "base")
    change = save_adapter(tmp_path / "adapter", weight, 0.077)
    calibration = save_calibration(tmp_path / "adapter" / "calibration.safetensors", weight.shape[1])
    w, cols = weight.double().numpy(), weight.shape[1]
    sketch, diagonal = input_terms(calibration)
    merge = ["merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original"]
    for rounding in ("adapter", "calibrated"):
        out = tmp_path / f"out-{rounding}"
        report = run_json(*merge, "--to", *(FORMATS | GROUPS)[kind], "--rounding", rounding, "--out", out)
        assert report["rounding"] == rounding
        along = adapter_columns(change, 8, 1000)
        h = along @ along.T + np.eye(cols)
        if rounding == "calibrated":
            assert (report["calibrated"], report["not_calibrated"]) == (1, 0)
            h = along @ along.T + sketch @ sketch.T + np.diag(diagonal)
        assert share_equal(out, kind, w + change, h) >= 0.999, rounding
    file = tmp_path / "adapter" / "calibration.safetensors"
    run(
        "quantize",
        tmp_path / "base",
        tmp_path / "q",
        "--to",
        *(FORMATS | GROUPS)[kind],
        "--calibration",
        file,
    )
    h = sketch @ sketch.T + np.diag(diagonal)
    assert share_equal(tmp_path / "q", kind, w, h) >= 0.999
    # The control: another matrix gives other codes.
    assert share_equal(tmp_path / "q", kind, w, np.eye(cols)) < 0.99


def along_v(change, error, rank):
    """Of an error: what is kept of the change, and the length of the error along its directions."""
    v = np.linalg.svd(change, full_matrices=False)[2][:rank]
    kept = 1 + (change * error).sum() / (change**2).sum()
    return kept, np.linalg.norm(error @ v.T) / np.linalg.norm(change)


def decoded(folder):
    """As a model in bf16 reads it."""
    wide = folder.with_name(folder.name + "-wide")
    run("dequantize", folder, wide, "--to", "fp32")
    return load_file(wide / "model.safetensors")[f"{MODULE}.weight"].bfloat16().double().numpy()


@pytest.mark.parametrize("kind", FORMATS | GROUPS)
def test_what_is_kept_of_adapters_of_three_strengths(tmp_path, kind):
    """On a base that lies on the grid, into the same format; 1024 inputs and rank 16."""
    save_base(tmp_path / "base", 128, 1024, torch.bfloat16)
    to = ["--to", *(FORMATS | GROUPS)[kind]]
    run("quantize", tmp_path / "base", tmp_path / "packed", *to)
    base = decoded(tmp_path / "packed")
    for strength, least, most in ((0.077, 0.99, 0.10), (0.02, 0.98, 0.12), (0.01, 0.97, 0.25)):
        adapter = tmp_path / f"adapter-{strength}"
        change = save_adapter(adapter, torch.from_numpy(base), strength, 16)
        merge = ["merge", tmp_path / "packed", "--adapter", adapter, "--base", "dequantized", *to]
        found = {}
        for rounding in ("nearest", "adapter"):
            out = tmp_path / f"out-{rounding}-{strength}"
            whole = run_json(*merge, "--rounding", rounding, "--out", out)["whole"]
            kept, error = along_v(change, decoded(out) - base - change, 16)
            assert abs(whole["kept"] - kept) < 1e-6
            assert abs(whole["error_along_adapter"] - error) < 1e-6
            found[rounding] = error
            if rounding == "adapter":
                assert abs(kept - 1) <= 1 - least, (strength, kept)
                assert error <= most, (strength, error)
        assert found["adapter"] < found["nearest"] / 5


WIDE = {"mxfp8": ["mxfp8"], "fp8-block": ["fp8-block"]}


@pytest.mark.parametrize("kind", ["nf4-double", "mxfp8", "fp8-block", "int4-32", "int8", "fp8"])
def test_several_adapters_dora_and_either_base(tmp_path, kind):
    """The error along the sum of weighted LoRAs, and along the total change of a DoRA, with each rounding."""
    weight = save_base(tmp_path / "base", 128, 256, torch.bfloat16)
    to = ["--to", *(FORMATS | WIDE | GROUPS)[kind]]
    strength = 0.077 if kind in ("nf4-double", "int4-32") else 0.01  # steps of 8 bits are a sixteenth
    changes = [
        save_adapter(tmp_path / name, weight, strength, 4, seed)
        for name, seed in (("first", 5), ("second", 6))
    ]
    dora = save_adapter(tmp_path / "dora", weight, strength, 4, 7, use_dora=True)
    file = tmp_path / "calibration.safetensors"
    save_calibration(file, 256)
    run("quantize", tmp_path / "base", tmp_path / "packed", *to)
    magnitude = load_file(tmp_path / "dora" / "adapter_model.safetensors")
    magnitude = magnitude[f"base_model.model.{MODULE}.lora_magnitude_vector"].double().numpy()
    for origin, folder in (("original", "base"), ("dequantized", "packed")):
        base = weight.double().numpy() if origin == "original" else decoded(tmp_path / folder)
        whole = base + dora
        whole *= (magnitude / np.linalg.norm(whole, axis=1))[:, None]
        cases = {
            "lora": (["first:0.75", "second:-0.5"], 0.75 * changes[0] - 0.5 * changes[1], 8),
            "dora": (["dora"], whole - base, None),
        }
        for case, (adapters, change, rank) in cases.items():
            merge = ["merge", tmp_path / folder, "--base", origin, *to]
            for adapter in adapters:
                merge += ["--adapter", tmp_path / adapter]
            rows = {}
            for rounding in ("nearest", "adapter", "calibrated"):
                out = tmp_path / f"{origin}-{case}-{rounding}"
                more = ["--calibration", file] if rounding == "calibrated" else ["--rounding", rounding]
                report = run_json(*merge, *more, "--out", out)
                assert report["rounding"] == rounding
                rows[rounding] = report["whole"]
                error = decoded(out) - base - change
                kept, along = along_v(change, error, rank or 256)
                assert abs(rows[rounding]["kept"] - kept) < 1e-6, (origin, case, rounding)
                if rank is not None:
                    assert abs(rows[rounding]["error_along_adapter"] - along) < 1e-6, (origin, case)
            for rounding in ("adapter", "calibrated"):
                # The adapter is one of two terms beside the inputs.
                share = 0.5 if rounding == "adapter" else 0.9
                found = rows[rounding]["error_along_adapter"]
                assert found < share * rows["nearest"]["error_along_adapter"], (origin, case, rounding)


@pytest.mark.parametrize("rounding", ["adapter", "calibrated"])
def test_every_instruction_set_and_number_of_threads_gives_the_same_bytes(tmp_path, rounding):
    weight = save_base(tmp_path / "base", 100, 320)
    save_adapter(tmp_path / "adapter", weight, 0.05, 5, use_dora=True)
    save_calibration(tmp_path / "adapter" / "calibration.safetensors", 320)
    merge = ["merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original"]
    for kind in ("nf4-double", "nvfp4", "int4-32", "int8", "fp8"):
        found = set()
        for isa, jobs in (("scalar", 3), ("avx2", 2), ("avx512", 1), ("amx", 1)):
            out = tmp_path / f"{kind}-{isa}"
            more = ["--to", *(FORMATS | GROUPS)[kind], "--rounding", rounding, "--out", out, "--jobs", jobs]
            run(*merge, *more, env=os.environ | {"MONOGRAPH_ISA": isa})
            found.add((out / "model.safetensors").read_bytes())
        assert len(found) == 1


def test_refusals_name_what_is_wrong(tmp_path):
    weight = save_base(tmp_path / "base", 64, 128)
    save_adapter(tmp_path / "adapter", weight, 0.05)
    file, out = tmp_path / "c.safetensors", ["--out", tmp_path / "out"]
    save_calibration(file, 128)
    merge = ["merge", tmp_path / "base", "--adapter", tmp_path / "adapter", "--base", "original", *out]
    nf4 = ["--to", "nf4"]
    missing = run(*merge, *nf4, "--rounding", "calibrated", code=2).stderr
    assert "--calibration" in missing
    assert "no adapter has calibration.safetensors beside it" in missing
    mixed = run(*merge, *nf4, "--rounding", "nearest", "--calibration", file, code=2).stderr
    assert "is for --rounding calibrated, --rounding is 'nearest'" in mixed
    wide = run(*merge, "--to", "bf16", "--calibration", file, code=2).stderr
    assert "is 'calibrated', which is for a packed output; --to is 'bf16'" in wide
    assert "no-such" in run(*merge, *nf4, "--calibration", tmp_path / "no-such", code=5).stderr
    quantize = ["quantize", tmp_path / "base", tmp_path / "q"]
    saturate = run(*quantize, "--calibration", file, "--nonfinite", "saturate", code=2).stderr
    assert "'saturate' is not for --calibration" in saturate
    save_calibration(file, 130)
    for command in ([*merge, *nf4], quantize):
        refused = run(*command, "--calibration", file, code=3).stderr
        assert "has a sketch of 130 inputs, the weight has 128" in refused
    save_calibration(file, 128, module="model.layers.7.mlp.up_proj")
    assert "inputs of none of the 1 packed weights" in run(*merge, *nf4, "--calibration", file, code=3).stderr
    assert "none of the 1 weights to quantise" in run(*quantize, "--calibration", file, code=3).stderr
    save_file({"x.sketch": torch.zeros(1, 2)}, file, {"monograph.calibration": "1"})
    assert "has no 'x.diagonal' beside it" in run(*merge, *nf4, "--calibration", file, code=3).stderr
    # A record of another base than the adapter's.
    save_calibration(file, 128, **{"monograph.base_sha256": "b" * 64})
    record = {"schema_version": 1, "base": {"sha256": "a" * 64, "weights": "original"}}
    (tmp_path / "adapter" / "monograph.json").write_text(json.dumps(record))
    other = run(*merge, *nf4, "--calibration", file, code=3).stderr
    assert "was made with the base of hash " + "b" * 64 in other
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "q").exists()
