"""Malformed and hostile GGUF files, each with its name: refused by name by the native tool and the loader,
without a crash, a wait or memory that the file has not; odd ones that are right have the right values."""

import json
import struct
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import monograph as mg
from support.gguf_bytes import ARRAY, STRING, TYPES, U32, Array, File, Pair, Tensor, tiny_llama
from support.hostile_gguf import ACCEPTED, CONFIG, HEADER, PLAN, TOKENIZER, VALUES
from support.measured_runs import measured_all
from support.native_tool import program, run_json

CASES = [(stage, *case) for stage, cases in {
    "header": HEADER, "plan": PLAN, "config": CONFIG, "tokenizer": TOKENIZER, "values": VALUES,
}.items() for case in cases]  # fmt: skip
SECONDS, PEAK, SPACE = 2.0, 100_000_000, 1_000_000_000


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The hostile files by name."""
    folder = tmp_path_factory.mktemp("hostile")
    made = {}
    for _, name, _, change in CASES:
        file, _ = tiny_llama()
        change(file)
        made[name] = folder / f"{name}.gguf"
        made[name].write_bytes(file.bytes())
    return made


def commands_of(name, path, out):
    return {
        "inspect": [program(), "inspect", path, "--json", "--quiet"],
        "verify": [program(), "verify", path, "--json", "--quiet"],
        "dequantize": [program(), "dequantize", path, out / name, "--json", "--quiet"],
    }


# What each command ends with: 0, 1 for a finding, 3 for a file that it cannot use.
CODES = {
    "header": {"inspect": 3, "verify": 3, "dequantize": 3},
    "plan": {"inspect": 0, "verify": 0, "dequantize": 3},
    "config": {"inspect": 0, "verify": 0, "dequantize": 0},
    "tokenizer": {"inspect": 0, "verify": 0, "dequantize": 0},
    "values": {"inspect": 0, "verify": 1, "dequantize": 3},
}


def test_there_are_enough_of_them():
    names = [name for _, name, *_ in CASES]
    assert len(names) == len(set(names))
    assert len(names) >= 60 + 60


def test_the_tool_refuses_each_by_name(files, tmp_path):
    commands = [
        (case, command, line)
        for case in CASES
        for command, line in commands_of(case[1], files[case[1]], tmp_path).items()
    ]
    done = measured_all([line for *_, line in commands], address_space=SPACE)
    findings = []
    for ((stage, name, message, _), command, _), result in zip(commands, done, strict=True):
        said = result.error if result.code == 3 else result.output
        wrong = result.code != CODES[stage][command] or result.seconds > SECONDS or result.peak_bytes > PEAK
        if result.code == 3:
            wrong |= said.count("\n") != 1 or message not in said or name + ".gguf" not in said
            wrong |= (tmp_path / name).exists()
        elif command == "dequantize":
            why = [one for one in json.loads(said)["missing"] if one.startswith(stage + ".json: ")]
            wrong |= len(why) != 1 or message not in why[0]
            wrong |= (tmp_path / name / f"{stage}.json").exists()
        elif command == "verify" and stage == "values":
            wrong |= [one["weight"] for one in json.loads(said)["findings"]] != [message]
        if wrong:
            findings.append(f"{command} {name}: {result}")
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize("stage", ["header", "plan", "config", "tokenizer"])
def test_the_loader_refuses_each_by_name(files, stage):
    findings = []
    for of, name, message, _ in CASES:
        if of != stage:
            continue
        start = time.process_time()
        try:
            mg.from_pretrained(files[name])
            findings.append(f"{name}: accepted")
        except ValueError as error:
            said = str(error)
            # Settings are looked at before names are.
            if name + ".gguf" not in said or (stage != "plan" and message not in said):
                findings.append(f"{name}: {said!r}, wanted {message!r}")
        if time.process_time() - start > 10 * SECONDS:
            findings.append(f"{name}: {time.process_time() - start:.1f} s")
    assert not findings, "\n".join(findings)


def test_a_number_that_is_none_stays_one(files):
    """The loader maps blocks and reads no value: what is broken there stays broken, in its place alone."""
    file, weights = tiny_llama()
    for _, name, *_ in (case for case in CASES if case[0] == "values"):
        model = mg.from_pretrained(files[name], dtype=torch.float32).dequantize()
        differ = {key: v for key, v in model.state_dict().items() if not np.array_equal(v, weights[key])}
        ((key, values),) = differ.items()
        same = values.numpy() == weights[key]
        assert not np.isfinite(values.numpy()[~same]).any(), name
        assert 1 <= (~same).sum() <= 32, name
    assert file.bytes()


def test_every_cut_is_refused(tmp_path):
    """The file ends at a border of its structure, one byte before or behind it."""
    file, _ = tiny_llama()
    whole = file.bytes()
    ends = sorted({border + step for border in file.borders for step in (-1, 0, 1)} & set(range(len(whole))))
    assert len(ends) > 400
    paths = []
    for end in ends:
        paths.append(tmp_path / f"{end}.gguf")
        paths[-1].write_bytes(whole[:end])
    for path, result in zip(paths, measured_all([program(), "verify", path] for path in paths), strict=True):
        assert result.code == 3, (path.name, result)
        assert path.name in result.error, result
    for path in paths:
        with pytest.raises(ValueError, match=path.name):
            mg.from_pretrained(path)


@pytest.mark.parametrize(("name", "change"), ACCEPTED, ids=[name for name, _ in ACCEPTED])
def test_odd_files_that_are_right_have_the_right_values(tmp_path, name, change):
    file, wanted = tiny_llama()
    change(file)
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(file.bytes())
    said = run_json("dequantize", path, tmp_path / "out", "--to", "fp32")
    assert said["missing"] == []
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    model = mg.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 3, 4, 30]])).logits).all()
    state = model.dequantize().state_dict()
    for key, values in wanted.items():
        assert np.array_equal(found[key].numpy(), values), key
        assert np.array_equal(state[key].numpy(), values), key
    assert run_json("verify", path)["findings"] == []
    assert run_json("inspect", path)["total"]["tensors"] == len(wanted)


def test_many_pairs_and_tensors_take_no_square_of_time(tmp_path):
    """Two hundred thousand pairs; forty thousand layers, all there. By squares these take minutes."""
    number = struct.pack("<I", 1)
    pairs = [Pair(f"general.{i}".encode(), U32, number) for i in range(200_000)]
    (tmp_path / "pairs.gguf").write_bytes(File(pairs, []).bytes())
    layers = 40_000
    file, _ = tiny_llama()
    file.alignment = 8
    file.set("general.alignment", U32, 8)
    for key, value in {
        "block_count": layers, "embedding_length": 2, "feed_forward_length": 1, "vocab_size": 2,
        "attention.head_count": 1, "attention.head_count_kv": 1,
    }.items():  # fmt: skip
        file.set("llama." + key, U32, value)
    for role in ("bos", "eos"):
        file.drop(f"tokenizer.ggml.{role}_token_id")
    file.set("tokenizer.ggml.tokens", ARRAY, Array(STRING, ["a", "b"]))
    shapes = {"attn_norm": [2], "ffn_norm": [2], "ffn_gate": [1, 2], "ffn_up": [1, 2], "ffn_down": [2, 1]}
    shapes |= {f"attn_{part}": [2, 2] for part in ("q", "k", "v", "output")}

    def plain(name, shape):
        return Tensor(name.encode(), shape, TYPES["f32"], bytes(4 * int(np.prod(shape))))

    file.tensors = [plain("token_embd.weight", [2, 2]), plain("output_norm.weight", [2])]
    for layer in range(layers):
        file.tensors += [plain(f"blk.{layer}.{name}.weight", shape) for name, shape in shapes.items()]
    (tmp_path / "layers.gguf").write_bytes(file.bytes())
    commands = [
        [program(), "inspect", tmp_path / "pairs.gguf", "--json"],
        [program(), "dequantize", tmp_path / "layers.gguf", tmp_path / "out", "--dry-run", "--json"],
    ]
    for result in measured_all(commands):
        assert result.code == 0, result.error
        assert result.seconds < 30
    assert all(not why.startswith("config.json") for why in json.loads(result.output)["missing"])
