"""The base that an adapter records: one hash for Python and the native program, compared by every command."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from monograph.ops.checkpoint_sha256 import checkpoint_sha256
from monograph.recipe.run.base_fingerprint import make_base_fingerprint, write_base_fingerprint
from support.native_tool import program, run, run_json
from support.stored_bases import SIZES, write_adapter, write_base


@pytest.fixture
def folders(tmp_path):
    """A base and an adapter that records it, and another base of the same shapes."""
    of = write_base(tmp_path / "base", "plain", SIZES["odd"])
    write_adapter(tmp_path / "adapter", of)
    write_base_fingerprint(
        make_base_fingerprint(str(tmp_path / "base"), str(tmp_path / "adapter"), quantised=False),
        str(tmp_path / "adapter"),
    )
    shutil.copytree(tmp_path / "base", tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    return tmp_path


def test_python_and_the_native_program_hash_the_same_files(folders):
    base = folders / "base"
    alone = checkpoint_sha256(base)
    assert run_json("inspect", base, "--hash")["sha256"] == alone
    save_file({"x": np.zeros(3, np.float32)}, base / "consolidated.safetensors")
    assert checkpoint_sha256(base) == alone
    assert run_json("inspect", base, "--hash")["sha256"] == alone


def test_a_file_beside_the_model_keeps_no_adapter_from_its_base(folders):
    base, adapter = folders / "base", folders / "adapter"
    save_file({"x": np.zeros(3, np.float32)}, base / "consolidated.safetensors")
    write_base_fingerprint(make_base_fingerprint(str(base), str(adapter), quantised=False), str(adapter))
    run("merge", base, "--adapter", adapter, "--out", folders / "merged", "--quiet")


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"checkpoint_sha256: .*model.safetensors.*No such file"):
        checkpoint_sha256(tmp_path)


def checked(*words):
    done = subprocess.run([program(), *map(str, words), "--json"], capture_output=True, text=True)
    return json.loads(done.stdout)["findings"]


@pytest.mark.parametrize("server", ["vllm", "peft", "llama.cpp"])
def test_check_and_convert_refuse_another_base_as_merge_does(folders, server):
    adapter, other = folders / "adapter", folders / "other"
    out = folders / ("out.gguf" if server == "llama.cpp" else "out")
    recorded = json.loads((adapter / "monograph.json").read_text())["base"]["sha256"]
    words = ["adapter", "check", other, adapter, "--for", server]
    findings = checked(*words)
    assert [one["rule"] for one in findings if recorded in one["what"]] == ["another-base"]
    assert findings[:-1] == checked(*words, "--another-base")
    words = ["adapter", "convert", other, adapter, "--for", server, "--out", out]
    assert recorded in (done := run(*words, code=3)).stderr
    assert "--another-base" in done.stderr
    if server != "llama.cpp":  # which has no tensor for 7 rows of a head
        run(*words, "--another-base")


def test_merge_takes_another_base_by_the_same_option(folders):
    words = ["merge", folders / "other", "--adapter", folders / "adapter", "--out", folders / "merged"]
    assert "--another-base merges all the same" in run(*words, code=3).stderr
    done = run(*words, "--another-base")
    assert f"wrote {folders / 'merged'} (" in done.stdout
    assert "monograph export" in done.stderr
    assert "was trained on the base with hash" in done.stderr


def test_an_adapter_is_no_model(folders):
    for words in (
        ["export", folders / "adapter", folders / "x.gguf"],
        ["quantize", folders / "adapter", folders / "x"],
    ):
        more = ["--to", "nf4"] if words[0] == "quantize" else []
        stderr = run(*words, *more, code=3).stderr
        assert "this is an adapter; merge it into its base first: monograph merge BASE --adapter" in stderr
