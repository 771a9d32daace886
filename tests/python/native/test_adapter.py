"""The parser of PEFT's adapter files against PEFT itself: fields, patterns, ranks and scales."""

import dataclasses
import json
import random
import re
import subprocess

import pytest
from peft import LoraConfig, get_peft_model
from peft.utils.other import get_pattern_key

from support.native_tool import program
from support.tiny_models import tiny_llama


def read_adapters(*arguments, text=None, code=0):
    command = [str(program("read_adapters", "core/monograph/adapter")), *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines() if code == 0 else done.stderr


def test_every_field_of_the_installed_peft_is_listed():
    listed = {line.split()[0] for line in read_adapters("fields")}
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - listed == set(), (
        "decide what these fields do to a merge: core/monograph/adapter/config.cpp"
    )


def model():
    return tiny_llama(hidden_size=32, intermediate_size=48, num_attention_heads=2)


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_scales_are_those_of_peft(tmp_path, rslora):
    config = LoraConfig(
        r=6,
        lora_alpha=10,
        target_modules="all-linear",
        use_rslora=rslora,
        rank_pattern={"v_proj": 3, r"^model\.layers\.1.*gate_proj": 2, "layers.(0|1).mlp.*_proj": 5},
        alpha_pattern={"q_proj": 3, r".*\.1\..*(up|down)_proj": 7},
    )
    peft_model = get_peft_model(model(), config)
    peft_model.save_pretrained(tmp_path)
    found = {}
    for line in read_adapters("adapter", tmp_path):
        name, rank, scale = line.split()
        found[name] = (int(rank), float.fromhex(scale))
    wanted = {
        name.removeprefix("base_model.model."): (layer.r["default"], layer.scaling["default"])
        for name, layer in peft_model.named_modules()
        if hasattr(layer, "lora_A") and "default" in layer.lora_A
    }
    assert len(wanted) == 14
    assert found == wanted


SETTINGS = {
    "use_qalora": True,
    "layer_replication": [[0, 1], [0, 2]],
    "target_parameters": "x",
    "init_lora_weights": "pissa",
    "alora_invocation_tokens": [1],
    "an_invented_field": 1,
}


@pytest.mark.parametrize("field", SETTINGS)
def test_a_field_that_cannot_be_merged_is_named(tmp_path, field):
    get_peft_model(model(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: SETTINGS[field]}))
    assert field in read_adapters("adapter", tmp_path, code=3)


def random_pattern(rng, depth=0):
    parts = []
    for _ in range(rng.randint(1, 4)):
        atom = rng.choice(["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "^", "$", "ab", "1", "("])
        if atom == "(":
            atom = f"({random_pattern(rng, depth + 1)})" if depth < 2 else "a"
        if atom not in "^$":
            atom += rng.choice(["", "", "", "*", "+", "?", "{1,2}", "*?", "{2}"])
        parts.append(atom)
    pattern = "".join(parts)
    return f"{pattern}|{random_pattern(rng, depth + 1)}" if depth < 2 and rng.random() < 0.2 else pattern


def test_patterns_match_what_peft_matches_over_20000_random_pairs():
    rng = random.Random(7)
    pairs = []
    while len(pairs) < 20_000:
        pattern = random_pattern(rng)
        try:
            re.compile(pattern)
        except re.error:
            continue
        name = "".join(rng.choice("ab.1a.") for _ in range(rng.randint(0, 7)))
        pairs.append((pattern, name))
    lines = read_adapters("match", text="".join(f"{p}\t{n}\n" for p, n in pairs))
    matched = 0
    for (pattern, name), line in zip(pairs, lines, strict=True):
        # get_pattern_key returns the name itself when nothing matched.
        wanted = get_pattern_key([pattern], name) == pattern
        if not wanted and pattern == name:
            continue
        assert line == str(int(wanted)), (pattern, name)
        matched += wanted
    assert 2_000 < matched < 18_000
