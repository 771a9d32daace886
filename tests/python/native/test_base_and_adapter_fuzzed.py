"""A base and its adapter changed together, at random: no command ends by a signal or unexpectedly."""

import copy
import json
import random
import shutil
import subprocess

import pytest

from support.native_tool import program
from support.stored_bases import SIZES, STORAGES, write_adapter, write_base

RUNS = 25
NUMBERS = [0, -1, 1, 2, 3, 2**31, 2**32, 2**63, 2**64 - 1, 1e308, 0.5]
WORDS = [
    "",
    "x",
    "[",
    "(((",
    "a{1000}{1000}",
    "\0",
    "model.layers.0",
    "q_proj",
    "LORA",
    "gpt_oss",
    "llama4_text",
]
OTHERS = [None, [], {}, [[]], {"a": 1}, True, False, [None], ["experts.down_proj"]]


def spoil_json(r, value):
    """Another value at one place of a JSON object, or a key less."""
    places = [(value, key) for key in value]
    for inner in value.values():
        if isinstance(inner, dict):
            places += [(inner, key) for key in inner]
    where, key = r.choice(places)
    if r.random() < 0.2:
        del where[key]
    else:
        where[key] = copy.deepcopy(r.choice(NUMBERS + WORDS + OTHERS))


def spoil_tensors(r, path):
    """Another shape, type or name for one tensor of a safetensors file, which may fit its bytes or not."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = r.choice([key for key in header if key != "__metadata__"])
    entry, shape = header[name], header[name]["shape"]
    kind = r.random()
    if kind < 0.5:
        entry["shape"] = r.choice([shape[::-1], [0, *shape], [1, *shape], [*shape, 1], [], [0] * len(shape)])
        if r.random() < 0.5:
            entry["data_offsets"] = [entry["data_offsets"][0]] * 2
    elif kind < 0.65:
        entry["dtype"] = r.choice(["F32", "F16", "BF16", "I8", "F64", "U8"])
    elif kind < 0.9:
        changed = [
            name.replace("lora_A", "lora_B"), name + ".x", name.replace("0", "99999999999999999999"),
            name.replace(".weight", ".default.weight"), "base_model.model." + name, "a" * 5000,
            name.replace("q_proj", "experts.1.up_proj"), name.replace(".lora_A", ".base_layer.lora_A"),
            name.replace("gate_up_proj", "down_proj"), name.replace("experts", "experts.0"),
        ]  # fmt: skip
        header[r.choice(changed)] = header.pop(name)
    else:
        del header[name]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def commands(r, base, adapter, folder):
    server = r.choice(["vllm", "sglang", "llama.cpp", "peft"])
    out = folder / ("out.gguf" if server == "llama.cpp" else "out")
    to = r.choice(["nf4", "bf16", "mxfp4", "same"])
    yield "inspect", base
    yield "verify", base
    yield "adapter", "check", base, adapter, "--for", server
    yield "adapter", "convert", base, adapter, "--for", server, "--out", out, "--force"
    yield (
        "merge",
        base,
        "--adapter",
        adapter,
        "--base",
        "original",
        "--out",
        folder / "merged",
        "--to",
        to,
        "--force",
    )
    yield "quantize", base, folder / "packed", "--to", "nf4", "--experts", "stack", "--force"
    yield "export", base, folder / "model.gguf", "--force"


@pytest.mark.parametrize("storage", [name for name in STORAGES if name != "packed"])
def test_no_change_ends_a_command_by_a_signal(tmp_path, storage):
    r = random.Random(storage)
    of = write_base(tmp_path / "base", storage, SIZES["odd"])
    write_adapter(tmp_path / "adapter", of)
    for number in range(RUNS):
        folder = tmp_path / str(number)
        for name in ("base", "adapter"):
            shutil.copytree(tmp_path / name, folder / name)
        for _ in range(r.randint(1, 3)):
            name, weights, config = r.choice(
                [
                    ("base", "model.safetensors", "config.json"),
                    ("adapter", "adapter_model.safetensors", "adapter_config.json"),
                ]
            )
            if r.random() < 0.5:
                spoil_tensors(r, folder / name / weights)
            else:
                value = json.loads((folder / name / config).read_text())
                if value:
                    spoil_json(r, value)
                (folder / name / config).write_text(json.dumps(value))
        for words in commands(r, folder / "base", folder / "adapter", folder):
            command = [str(program()), *map(str, words)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode in (0, 1, 3, 4), f"{number}: {command}: {done.returncode}\n{done.stderr}"
        shutil.rmtree(folder)
