"""monograph verify and monograph diff."""

import json
import resource
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.native_tool import run, run_json
from support.tiny_models import save_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def packed(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "nf4"
    run("quantize", llama, folder, "--double-quant")
    return folder


def changed(folder, target, change):
    """A copy of `folder` with its tensors changed by `change(state)`."""
    shutil.copytree(folder, target)
    state = load_file(target / "model.safetensors")
    change(state)
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


UP = "model.layers.0.mlp.up_proj.weight"


def test_a_good_folder_has_no_finding(llama, packed):
    for folder in (llama, packed):
        report = run_json("verify", folder)
        assert report["findings"] == []
        assert report["mismatches"] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nan_and_infinity_are_counted_and_placed(tmp_path, dtype):
    weight = torch.zeros(3000, 1500, dtype=dtype)
    weight[2000, 7] = float("nan")
    weight[2500, 8] = -float("nan")
    weight[1, 2] = -float("inf")
    weight[5, 5] = torch.finfo(dtype).max
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    findings = run_json("verify", tmp_path, code=1)["findings"]
    assert findings == [
        {"weight": "a.weight", "part": "values", "what": "NaN", "count": 2, "first": 2000 * 1500 + 7},
        {"weight": "a.weight", "part": "values", "what": "infinity", "count": 1, "first": 1502},
    ]
    assert "infinity" in run("verify", tmp_path, code=1).stdout
    run("verify", tmp_path, "--no-scan")


def test_scales_that_are_nan_or_zero_are_found(packed, llama, tmp_path):
    def nan_group(state):
        state[UP + ".nested_absmax"][0] = float("nan")

    findings = run_json("verify", changed(packed, tmp_path / "a", nan_group), code=1)["findings"]
    assert [(f["part"], f["what"], f["count"]) for f in findings] == [("nested_absmax", "NaN", 1)]

    run("quantize", llama, tmp_path / "plain")

    def zero_scale(state):
        state[UP + ".absmax"][5] = 0

    findings = run_json("verify", changed(tmp_path / "plain", tmp_path / "b", zero_scale), code=1)["findings"]
    assert [(f["what"], f["count"], f["first"]) for f in findings] == [("zero scale", 1, 5)]

    def zero_block(state):
        state[UP + ".absmax"][5] = 0
        state[UP].view(-1)[5 * 32 : 6 * 32] = 0x77  # the code of 0 in NF4

    run("verify", changed(tmp_path / "plain", tmp_path / "c", zero_block))


def test_e4m3_and_e8m0_nan_codes_are_found(tmp_path):
    weight = torch.zeros(128, 256, dtype=torch.uint8)
    weight[1, 1] = 0xFF
    state = {"w.weight": weight.view(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(1, 2)}
    state["v.weight"] = torch.zeros(4, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    state["v.weight_scale"] = torch.full((4, 2), 255, dtype=torch.uint8)
    save_file(state, tmp_path / "model.safetensors")
    findings = run_json("verify", tmp_path, code=1)["findings"]
    assert [(f["weight"], f["part"], f["what"], f["count"]) for f in findings] == [
        ("v.weight", "scale", "NaN", 8),
        ("w.weight", "values", "NaN", 1),
    ]


def test_a_manifest_finds_one_flipped_bit_a_missing_and_a_new_tensor(llama, tmp_path):
    manifest = tmp_path / "manifest.json"
    run("verify", llama, "--write-manifest", manifest)
    entry = json.loads(manifest.read_text())["tensors"][UP]
    assert entry["dtype"] == "BF16"
    assert entry["shape"] == [192, 128]
    run("verify", llama, "--check", manifest)
    # Other files, the same tensors.
    sharded = save_llama(tmp_path / "sharded", max_shard_size="100KB")
    run("verify", sharded, "--check", manifest, "--no-scan")

    def flip(state):
        state[UP].view(torch.uint8).view(-1)[777] ^= 1

    text = run("verify", changed(llama, tmp_path / "flip", flip), "--check", manifest, code=4).stdout
    assert f"differs: {UP}" in text

    def rename(state):
        state["other.weight"] = state.pop(UP)

    report = run_json("verify", changed(llama, tmp_path / "rename", rename), "--check", manifest, code=4)
    assert report["mismatches"] == [f"missing: {UP}", "new: other.weight"]
    (tmp_path / "no.json").write_text("{}")
    assert "is no manifest" in run("verify", llama, "--check", tmp_path / "no.json", code=3).stderr


def test_a_manifest_replaces_nothing_but_a_manifest(llama, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "link").symlink_to("model.safetensors")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in ("model.safetensors", "config.json", "notes.txt", "link"):
        assert name in run("verify", folder, "--write-manifest", folder / name, code=2).stderr
    assert "is no file" in run("verify", folder, "--write-manifest", folder, code=2).stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    manifest = tmp_path / "manifest.json"
    run("verify", folder, "--write-manifest", manifest)
    first = manifest.read_bytes()
    run("verify", folder, "--write-manifest", manifest)
    assert manifest.read_bytes() == first


def test_checksums_are_those_of_xxhsum(tmp_path):
    if shutil.which("xxhsum") is None:
        pytest.skip("xxhsum is not installed")
    tensor = torch.arange(1000, dtype=torch.uint8)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    run("verify", tmp_path, "--write-manifest", tmp_path / "m.json")
    (tmp_path / "raw").write_bytes(bytes(tensor.tolist()))
    shown = subprocess.run(["xxhsum", "-H2", tmp_path / "raw"], capture_output=True, text=True, check=True)
    assert (
        shown.stdout.split()[0] == json.loads((tmp_path / "m.json").read_text())["tensors"]["a"]["xxh3_128"]
    )


def test_diff_of_a_folder_with_itself_and_with_a_resharded_copy(llama, tmp_path):
    assert run_json("diff", llama, llama)["mismatches"] == 0
    sharded = save_llama(tmp_path / "sharded", max_shard_size="100KB")
    text = run("diff", llama, sharded).stdout
    assert "21 weights: 21 same bytes" in text


def test_diff_across_formats_gives_the_figures_of_torch(llama, packed, tmp_path):
    report = run_json("diff", llama, packed, code=4)
    run("dequantize", packed, tmp_path / "dense", "--to", "fp32")
    source = load_file(llama / "model.safetensors")
    dense = load_file(tmp_path / "dense/model.safetensors")
    rows = {row["name"]: row for row in report["weights"]}
    assert rows["lm_head.weight"]["state"] == "same bytes"
    a, b = source[UP].double(), dense[UP].double()
    row, error = rows[UP], (a - b).abs()
    assert (row["format_a"], row["format_b"]) == ("bf16", "nf4")
    assert row["max_error"] == pytest.approx(error.max().item())
    assert row["mean_error"] == pytest.approx(error.mean().item())
    assert row["relative_error"] == pytest.approx((error.norm() / a.norm()).item())
    assert row["snr_db"] == pytest.approx(20 * torch.log10(a.norm() / error.norm()).item())
    assert row["cosine"] == pytest.approx(torch.nn.functional.cosine_similarity(a.view(-1), b.view(-1), 0))
    errors = [row.get("relative_error", 0) for row in report["weights"]]
    assert errors == sorted(errors, reverse=True)
    within = run("diff", llama, packed, "--tolerance", "0.15").stdout
    assert "7 same bytes, 14 within tolerance" in within
    assert "differs" not in within
    assert f"the largest relative error is {errors[0]:.2e}, --tolerance is 0.15" in within
    half = run_json("diff", llama, packed, "--tolerance", errors[6], code=4)
    assert [row["state"] for row in half["weights"]][:14] == ["differs"] * 6 + ["within tolerance"] * 8
    assert half["mismatches"] == 6
    assert half["weights"][13]["relative_error"] == errors[13]
    # The same values in another format are no difference.
    assert "14 same values" in run("diff", packed, tmp_path / "dense").stdout


def test_diff_takes_a_finite_tolerance_of_at_least_0(llama):
    for value in ("nan", "inf", "-1", "-nan"):
        assert "--tolerance" in run("diff", llama, llama, f"--tolerance={value}", code=2).stderr
    run("diff", llama, llama, "--tolerance", "0")


def test_diff_of_a_name_that_no_weight_has_is_an_error(llama):
    assert "--name: zzz" in run("diff", llama, llama, "--name", "zzz", code=2).stderr
    run("diff", llama, llama, "--name", "zzz", "--name", "up_proj")


def test_output_that_cannot_be_meant_is_a_wrong_command_line(llama, tmp_path):
    assert (
        "--max-shard-size" in run("quantize", llama, tmp_path / "x", "--max-shard-size", "0", code=2).stderr
    )
    assert run("quantize", llama, "", code=2).stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_the_size_of_files_is_exit_code_5(llama, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    assert "too large" in run("quantize", llama, tmp_path / "x", code=5, preexec_fn=limit).stderr
    assert list(tmp_path.iterdir()) == []


def test_diff_reports_what_is_on_one_side_or_of_another_shape(llama, tmp_path):
    def change(state):
        state["new.weight"] = state.pop(UP)
        state["model.norm.weight"] = torch.ones(3)
        state["lm_head.weight"][0, 0] = float("nan")

    report = run_json("diff", llama, changed(llama, tmp_path / "x", change), code=4)
    states = {row["name"]: row["state"] for row in report["weights"] if row["state"] != "same bytes"}
    assert states == {
        UP: "only in A",
        "new.weight": "only in B",
        "model.norm.weight": "other shape",
        "lm_head.weight": "differs",
    }
    assert report["mismatches"] == 4
