"""A recipe's device and device_map, and folders loaded to a device that is not the CPU.

On the stand-in of shadow_device.py, in a process of its own. References are the same runs on the CPU.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import pytest
import torch
from safetensors.torch import load_file

import monograph as mg
from monograph.recipe.config import placement
from monograph.recipe.config.compile_options import OPTIONS
from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.placement import check_ranks_of_device, device_of, written_device
from monograph.recipe.config.read_config import ConfigError, check_keys
from monograph.recipe.run.generate import Generator, Sampling
from monograph.recipe.run.load_model import attention_on, takes_ours
from monograph.recipe.train import train
from support import shadow_device, tiny_moe
from support.recipe_files import errors_of, make_instruction_world, make_model, small_recipe

ONE = "a recipe trains on one device; write device: cuda:0, or leave both out for the CPU"


def run_of(root, name, **change):
    """Losses of a short run, by step."""
    out = root / name
    keys = {"output_dir": str(out), "max_steps": 3, "torch_compile": False, "micro_batch_size": 1}
    train(check_keys(small_recipe(root, "instruction", **(keys | change))).recipe)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], lines


def test_a_device_that_is_not_there_is_named_with_what_was_found():
    here = f"found cpu alone (torch {torch.__version__} is built for the CPU alone); leave it out for the CPU"
    for keys in ({"device": "cuda"}, {"device_map": {"": 0}}, {"device_map": 0}, {"device": "cuda:0"}):
        with pytest.raises(ValueError, match="device: cuda") as error:
            device_of(Recipe(**keys))
        assert str(error.value).endswith(f"is not on this machine, {here}")
    assert device_of(Recipe(device_map="auto")) == device_of(Recipe()) == torch.device("cpu")
    assert device_of(Recipe(device="cpu:0")) == torch.device("cpu")


def test_train_and_doctor_refuse_it_before_they_read_data(tmp_path):
    make_instruction_world(tmp_path)
    keys = small_recipe(tmp_path, "instruction", device="xpu:1", output_dir=str(tmp_path / "out"))
    with pytest.raises(ValueError, match="device: xpu:1 is not on this machine"):
        train(check_keys(keys).recipe)
    assert not (tmp_path / "prepared").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"device_map": {"": "cuda:1", "lm_head": "cuda:1"}}, "cuda:1"),
        ({"device": "cuda", "device_map": "cuda"}, "cuda"),
        ({"device_map": "auto"}, "auto"),
        ({}, "cpu"),
    ],
)
def test_what_the_keys_say(keys, said):
    assert written_device(Recipe(**keys)) == said


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"device": "gpu"}, "device is 'gpu', wanted cpu, auto, cuda, cuda:0 or another device of torch"),
        (
            {"device_map": {"model": 0, "lm_head": "cpu"}},
            f"device_map: 2 devices (0, cpu); {ONE}",
        ),
        ({"device_map": "balanced"}, f"device_map is balanced, which spreads a model; {ONE}"),
        ({"device_map": "disk"}, f"device_map is disk, where nothing is computed; {ONE}"),
        ({"device": "meta"}, f"device is meta, where nothing is computed; {ONE}"),
        ({"device": "cpu", "device_map": "cuda"}, "device is cpu and device_map cuda; leave one out"),
        (
            {"device": "cuda", "shard_size": 2},
            "device is cuda, and a base is sharded among ranks on the CPU only; leave one out",
        ),
        ({"device_map": {"": [1]}}, "device_map.  is"),
    ],
)
def test_what_the_keys_may_not_say(tmp_path, keys, message):
    make_model(tmp_path / "model")
    with pytest.raises(ConfigError) as error:
        check_keys(small_recipe(tmp_path, "instruction", **keys))
    if message.startswith("device_map. "):
        assert "device_map" in error.value.errors[0]
    else:
        assert error.value.errors == [message]


def compile_notices(keys):
    return [notice for notice in check_keys(keys).notices if notice.startswith("torch_compile")]


@pytest.mark.parametrize("device", ["cpu", "xpu", "cuda"])
def test_cuda_graphs_are_for_cuda(device, tmp_path):
    """Elsewhere reduce-overhead means nothing, and no option is told to do nothing on a GPU."""
    make_model(tmp_path / "model")
    keys = small_recipe(tmp_path, "instruction", torch_compile="auto", device=device, sample_packing=False)
    message = (
        f"torch_compile_mode: reduce-overhead means CUDA graphs, and the device is {device}; "
        "leave it out, or write device: cuda"
    )
    graphs = keys | {"torch_compile_mode": "reduce-overhead"}
    options = {name: True for name in OPTIONS}
    if device == "cuda":
        assert check_keys(graphs).recipe.torch_compile_mode == "reduce-overhead"
        for mode in ("max-autotune", "max-autotune-no-cudagraphs", "default"):
            assert compile_notices(keys | {"torch_compile_mode": mode}) == []
        assert compile_notices(keys | {"torch_compile_options": options}) == []
    else:
        assert errors_of(graphs) == [message]
    if device == "xpu":
        (message,) = errors_of(keys | {"torch_compile_options": options})
        assert message == (
            "torch_compile_options: triton.cudagraphs is true, and the device is xpu; leave it out"
        )
    if device == "cpu":
        told = compile_notices(keys | {"torch_compile_options": options})
        assert len(told) == sum(reason is not None for reason in OPTIONS.values())


def test_numbers_and_auto_mean_the_accelerator_of_the_machine(monkeypatch):
    found = torch.device("xpu")
    monkeypatch.setattr(placement.torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(placement.torch.accelerator, "device_count", lambda: 2)
    assert device_of(Recipe(device_map={"": 1})) == torch.device("xpu:1")
    assert device_of(Recipe(device_map="auto")) == torch.device("xpu:0")
    with pytest.raises(
        ValueError, match=r"device: xpu:2 is not on this machine, found cpu and xpu:0 to xpu:1"
    ):
        device_of(Recipe(device=2))
    with pytest.raises(ValueError, match=r"device: cuda is not on this machine"):
        device_of(Recipe(device="cuda"))


def test_ranks_train_on_the_cpu():
    check_ranks_of_device(torch.device("cpu"), 4)
    check_ranks_of_device(torch.device("cuda"), 1)
    with pytest.raises(ValueError, match="device is cuda, and 2 processes train together on the CPU only"):
        check_ranks_of_device(torch.device("cuda"), 2)


@pytest.mark.parametrize(
    ("device", "keys", "name", "ours"),
    [
        ("cpu", {}, "monograph", True),
        ("cuda", {}, "monograph", True),
        ("cuda", {"attn_implementation": "sdpa"}, "sdpa", False),
        ("cuda", {"attn_implementation": "flash_attention_2"}, "monograph", True),
        ("xpu", {}, "sdpa", False),
        ("xpu", {"sample_packing": True}, "monograph", False),
        ("xpu", {"attn_implementation": "eager"}, "eager", False),
    ],
)
def test_attention_of_a_recipe(device, keys, name, ours):
    recipe = Recipe(**keys)
    assert attention_on(recipe, device) == name
    assert takes_ours(recipe, device) == ours


def a_run_has_the_losses_of_the_cpu(root):
    """Packed rows, checkpoints, evaluation, calibration; the kernels and the portable sums round apart."""
    more = {"val_set_size": 6, "eval_steps": 3, "save_steps": 2, "lora_dropout": 0.0, "calibration": 1}
    want, _ = run_of(root, "cpu", **more)
    got, lines = run_of(root, "there", device="shadow", **more)
    assert got == pytest.approx(want, rel=2e-3)
    assert any("eval_loss" in line for line in lines)
    assert (root / "there" / "calibration.safetensors").is_file()
    ours, theirs = (load_file(root / name / "adapter_model.safetensors") for name in ("there", "cpu"))
    assert ours.keys() == theirs.keys()
    assert (
        json.loads((root / "there" / "monograph.json").read_text())["base"]["packed"]
        == (json.loads((root / "cpu" / "monograph.json").read_text())["base"]["packed"])
    )


def a_resumed_run_has_the_bits_of_an_unbroken_one(root):
    whole = load_file(root / "there" / "adapter_model.safetensors")
    more = {"val_set_size": 6, "eval_steps": 3, "save_steps": 2, "device_map": {"": "shadow:0"}}
    run_of(root, "there", **more, resume_from_checkpoint=str(root / "there" / "checkpoint-2"))
    again = load_file(root / "there" / "adapter_model.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def padded_rows_and_a_start_from_the_base(root):
    more = {"sample_packing": False, "peft_init_lora_weights": "pissa", "gradient_accumulation_steps": 2}
    want, _ = run_of(root, "pissa_cpu", **more, attn_implementation="sdpa")
    got, _ = run_of(root, "pissa", **more, device_map="auto")
    assert got == pytest.approx(want, rel=2e-3)


def answers_are_those_of_the_cpu(root):
    told = []
    for device in ("cpu", "shadow"):
        keys = small_recipe(root, "instruction", output_dir=str(root / "there"), device=device)
        generator = Generator(check_keys(keys).recipe, str(root / "there"))
        answer = torch.no_grad()(Generator.answer.__wrapped__)  # inference mode knows no stand-in
        told.append(answer(generator, generator.tokens("What is 3?"), Sampling(max_new_tokens=4), print_no))
    assert told[0] == told[1]


def print_no(text):
    pass


FOLDERS = ("nf4", "nf4 nested", "fp4", "mxfp4", "mxfp8", "nvfp4", "fp8-block", "experts")


def folders_load_to_the_device_with_the_bytes_of_the_file(root):
    """Quantised before, mapped on the CPU and copied to the device; and quantised while they load there."""
    source = root / "dense"
    make_model(source, hidden_size=128)
    tiny_moe.save_tiny(root / "moe", "qwen3_moe", dtype=torch.bfloat16)
    for name in FOLDERS:
        dense = root / "moe" if name == "experts" else source
        format = "nf4" if name == "experts" else name.split()[0]
        config = mg.MonographConfig(format, double_quant=name == "nf4 nested")
        folder = root / name.replace(" ", "_")
        mg.from_pretrained(dense, config).save_pretrained(folder)
        want = mg.from_pretrained(folder)
        made = mg.from_pretrained(dense, config, device_map="shadow")
        moved = mg.from_pretrained(folder).to("shadow")
        for where in ("shadow", {"": "shadow:0"}, {"": torch.device("shadow", 0)}):
            compare(mg.from_pretrained(folder, device_map=where), want, name)
        compare(made, want, name)
        compare(moved, want, name)


def compare(got, want, name):
    ours, theirs = got.state_dict(), want.state_dict()
    assert ours.keys() == theirs.keys(), name
    for key, tensor in ours.items():
        assert tensor.device.type == "shadow", (name, key)
        assert tensor.data_ptr() % 16 == 0, (name, key)
        assert torch.equal(tensor.cpu(), theirs[key]), (name, key)
    ids = torch.arange(7)[None]
    with torch.no_grad():
        there, here = got(input_ids=ids.to("shadow")).logits.cpu(), want(input_ids=ids).logits
    assert (there - here).abs().max() <= 2**-5 * here.abs().max(), name


PARTS = (
    a_run_has_the_losses_of_the_cpu,
    a_resumed_run_has_the_bits_of_an_unbroken_one,
    padded_rows_and_a_start_from_the_base,
    answers_are_those_of_the_cpu,
    folders_load_to_the_device_with_the_bytes_of_the_file,
)


@pytest.mark.long
def test_on_a_stand_in_for_an_accelerator():
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, f"{run.returncode}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    assert [line[2:] for line in run.stdout.splitlines() if line.startswith("> ")] == [
        p.__name__ for p in PARTS
    ]


if __name__ == "__main__":
    shadow_device.install()
    with shadow_device.shadow(), tempfile.TemporaryDirectory() as folder:
        world = make_instruction_world(pathlib.Path(folder))
        for part in PARTS:
            torch.manual_seed(0)
            part(world)
            print(f"> {part.__name__}", flush=True)
