"""base_model: FILE.gguf in a recipe: checked, trained, resumed, generated from, served; what is refused."""

import json
import struct
import subprocess
import sys

import gguf
import pytest
import torch

from monograph.__main__ import main
from monograph.cli import native
from monograph.recipe.config.recipe_file import NAME as RECIPE
from support.gguf_bases import mixed_base
from support.native_tool import run, run_json
from support.producer_folders import tensors
from support.recipe_files import errors_of, small_recipe, write_jsonl

pytestmark = pytest.mark.slow
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def made(root, model="Qwen3", **keys):
    """The folder of a recipe on a GGUF file alone."""
    file, _ = mixed_base(model, root)
    (root / "model").rename(root / "not-there")
    rows = [{"instruction": f"What is {n}?", "output": f"{n} dog {n % 7}"} for n in range(40)]
    write_jsonl(root / "train.jsonl", rows)
    keys = {"base_model": str(file), "torch_compile": False, "max_steps": 4, "save_steps": 2} | keys
    write(root, small_recipe(root, "instruction", output_dir=str(root / "out"), **keys))
    return root


def write(root, recipe):
    (root / "recipe.yml").write_text(json.dumps(recipe))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = made(tmp_path_factory.mktemp("gguf"))
    assert main(["train", str(root / "recipe.yml")]) == 0
    return root


@pytest.fixture(scope="module")
def trained_experts(tmp_path_factory):
    """LoRA on attention and on the experts."""
    root = made(tmp_path_factory.mktemp("moe"), "Qwen3Moe", lora_target_parameters=EXPERTS)
    assert main(["train", str(root / "recipe.yml")]) == 0
    return root


def same_adapter(one, other):
    whole, again = tensors(one / "out"), tensors(other / "out")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def losses(root):
    lines = (root / "out" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if '"loss"' in line]


def test_it_is_trained_and_the_record_names_the_file(trained):
    found = losses(trained)
    assert found[-1] < found[0]
    base = json.loads((trained / "out" / "monograph.json").read_text())["base"]
    assert base["folder"] == str(trained / "it.gguf")
    assert base["sha256"] == run_json("inspect", trained / "it.gguf", "--hash", "--no-tensors")["sha256"]
    assert list(base["files"]) == ["it.gguf"]
    assert base["weights"] == "dequantized"
    settings = json.loads((trained / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(trained / "it.gguf")
    assert (trained / "out" / RECIPE).is_file()


def test_a_resumed_run_ends_with_the_same_bits(trained, tmp_path):
    root = made(tmp_path)
    recipe = json.loads((root / "recipe.yml").read_text())
    write(root, recipe | {"resume_from_checkpoint": str(trained / "out" / "checkpoint-2")})
    assert main(["train", str(root / "recipe.yml")]) == 0
    same_adapter(trained, root)


def test_two_processes_with_half_of_the_base_each_make_the_same_adapter(trained, tmp_path):
    recipe = json.loads((trained / "recipe.yml").read_text())
    write(tmp_path, recipe | {"output_dir": str(tmp_path / "out"), "shard_size": 2})
    command = [sys.executable, "-m", "monograph", "train", str(tmp_path / "recipe.yml")]
    done = subprocess.run([*command, "--nproc-per-node", "2"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    same_adapter(trained, tmp_path)


def test_another_file_is_refused_when_resumed(tmp_path, capsys):
    root = made(tmp_path, max_steps=2)
    assert main(["train", str(root / "recipe.yml")]) == 0
    file = root / "it.gguf"
    raw = bytearray(file.read_bytes())
    raw[-2000] ^= 1
    file.write_bytes(raw)
    recipe = json.loads((root / "recipe.yml").read_text())
    write(root, recipe | {"max_steps": 4, "auto_resume_from_checkpoints": True})
    assert main(["train", str(root / "recipe.yml")]) != 0
    assert "hash" in capsys.readouterr().err


def test_other_settings_of_the_same_tensors_are_refused_when_resumed(tmp_path, capsys):
    root = made(tmp_path, max_steps=2)
    assert main(["train", str(root / "recipe.yml")]) == 0
    raw, key = bytearray((root / "it.gguf").read_bytes()), b"attention.layer_norm_rms_epsilon"
    at = raw.index(key) + len(key) + 4  # behind the number of its type
    raw[at : at + 4] = struct.pack("<f", 0.5)
    (root / "it.gguf").write_bytes(raw)
    recipe = json.loads((root / "recipe.yml").read_text())
    write(root, recipe | {"max_steps": 4, "auto_resume_from_checkpoints": True})
    assert main(["train", str(root / "recipe.yml")]) != 0
    assert "config.json of base_model is" in capsys.readouterr().err


def test_the_adapter_answers_and_is_served(trained, capsys):
    assert main(["generate", str(trained / "out"), "--prompt", "What is 3?", "--max-new-tokens", "4"]) == 0
    out = trained / "lora.gguf"
    run("adapter", "convert", trained / "it.gguf", trained / "out", "--for", "llama.cpp", "--out", out)
    fields = gguf.GGUFReader(out).fields
    assert fields["general.architecture"].contents() == "qwen3"
    assert run("adapter", "check", trained / "it.gguf", trained / "out", "--for", "llama.cpp", code=0)
    message = run("adapter", "check", trained / "it.gguf", trained / "out", "--for", "vllm", code=3).stderr
    assert "is a GGUF file, and vllm wants a folder" in message


def test_another_file_is_no_base_of_the_adapter(trained, tmp_path):
    raw = bytearray((trained / "it.gguf").read_bytes())
    raw[-2000] ^= 1
    (tmp_path / "other.gguf").write_bytes(raw)
    words = ["adapter", "convert", tmp_path / "other.gguf", trained / "out", "--for", "llama.cpp"]
    message = run(*words, "--out", tmp_path / "lora.gguf", code=3).stderr
    assert "was trained on the base with hash" in message
    run(*words, "--out", tmp_path / "lora.gguf", "--another-base")


def test_a_recipe_is_merged_into_its_file(trained, monkeypatch):
    """The words for the native tool; the adapter records the file, and no option of folders is needed."""
    called = []
    monkeypatch.setattr(native, "exec_native", lambda words: called.append(words) or 0)
    assert main(["merge", str(trained / "recipe.yml")]) == 0
    out = f"{trained / 'out'}-merged.gguf"
    assert called == [["merge", str(trained / "it.gguf"), "--adapter", str(trained / "out"), "--out", out]]
    report = run_json(*called[0])
    assert len(report["weights"]) > 1
    assert report["below_threshold"] == 0
    other = [word.replace("it.gguf", "other.gguf") for word in called[0]]
    raw = bytearray((trained / "it.gguf").read_bytes())
    raw[-2000] ^= 1
    (trained / "other.gguf").write_bytes(raw)
    assert "was trained on the base with hash" in run(*other, "--force", code=0).stderr
    assert "was trained on the base with hash" in run(*other[:-1], trained / "new.gguf", code=3).stderr


def test_doctor_and_estimate(trained, capsys):
    assert main(["doctor", str(trained / "recipe.yml"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert not said["breaks"]
    assert not said["weight_copies"]
    assert main(["estimate", str(trained / "it.gguf"), "--rank", "4", "--tokens", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["bytes"]
    stored = sum(int(one.n_bytes) for one in gguf.GGUFReader(trained / "it.gguf").tensors)
    assert abs(found["base"] - stored) < 0.02 * stored


def test_what_does_not_go_with_it(trained):
    keys = json.loads((trained / "recipe.yml").read_text())
    (merged,) = errors_of(keys | {"merge_lora": True})
    assert "merge_lora: base_model is the GGUF file" in merged
    (served,) = errors_of(keys | {"serve_with": "vllm"})
    assert "which vllm does not run; write llama.cpp" in served
    (grown,) = errors_of(keys | {"base_model": str(trained / "gone.gguf")})
    assert "wanted the folder of a model or a GGUF file" in grown


def test_experts_are_trained_from_the_file(trained_experts, tmp_path):
    found = losses(trained_experts)
    assert found[-1] < found[0]
    assert sum("experts" in name for name in tensors(trained_experts / "out")) == 2 * 2 * 2
    root = made(tmp_path, "Qwen3Moe", lora_target_parameters=EXPERTS)
    recipe = json.loads((root / "recipe.yml").read_text())
    write(root, recipe | {"resume_from_checkpoint": str(trained_experts / "out" / "checkpoint-2")})
    assert main(["train", str(root / "recipe.yml")]) == 0
    same_adapter(trained_experts, root)


def test_experts_answer_and_are_served(trained_experts):
    out = trained_experts / "out"
    assert main(["generate", str(out), "--prompt", "What is 3?", "--max-new-tokens", "4"]) == 0
    made_of = trained_experts / "lora.gguf"
    run("adapter", "convert", trained_experts / "it.gguf", out, "--for", "llama.cpp", "--out", made_of)
    shapes = {t.name: [int(n) for n in t.shape] for t in gguf.GGUFReader(made_of).tensors}
    for part in ("gate", "up", "down"):
        assert shapes[f"blk.1.ffn_{part}_exps.weight.lora_b"][1:] == [256, 6]
    assert main(["estimate", str(trained_experts / "it.gguf")]) == 0


@pytest.mark.parametrize("key", ["shard_size", "expert_parallel_size"])
def test_two_processes_make_the_same_adapter_of_experts(trained_experts, tmp_path, key):
    recipe = json.loads((trained_experts / "recipe.yml").read_text())
    write(tmp_path, recipe | {"output_dir": str(tmp_path / "out"), key: 2})
    command = [sys.executable, "-m", "monograph", "train", str(tmp_path / "recipe.yml")]
    done = subprocess.run([*command, "--nproc-per-node", "2"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    same_adapter(trained_experts, tmp_path)


def test_gpt_oss_is_trained_and_resumed_and_in_two_processes(tmp_path_factory):
    """Gate and up as two stacks whose rows alternate: one adapter, whatever the way."""
    keys = {"lora_target_parameters": EXPERTS}
    whole, again = (made(tmp_path_factory.mktemp(name), "GptOss", **keys) for name in ("oss", "again"))
    assert main(["train", str(whole / "recipe.yml")]) == 0
    found = losses(whole)
    assert found[-1] < found[0]
    recipe = json.loads((again / "recipe.yml").read_text())
    write(again, recipe | {"resume_from_checkpoint": str(whole / "out" / "checkpoint-2")})
    assert main(["train", str(again / "recipe.yml")]) == 0
    same_adapter(whole, again)
    recipe = json.loads((whole / "recipe.yml").read_text())
    both = tmp_path_factory.mktemp("both")
    write(both, recipe | {"output_dir": str(both / "out"), "expert_parallel_size": 2})
    command = [sys.executable, "-m", "monograph", "train", str(both / "recipe.yml")]
    done = subprocess.run([*command, "--nproc-per-node", "2"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    same_adapter(whole, both)
