"""Whatever config.json says, the native trainer trains, or an error names the key or what it contradicts."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.native_steps import ATTENTION, MIXTURE, STACKED, Case, make_base, native_steps, packed, start
from support.native_tool import program

pytestmark = pytest.mark.slow

NF4 = ("nf4", "--double-quant")
WRONG: list[Any] = [None, -1, 0, 3, 2**31, 1e300, 0.5, True, "x", "", [], [1], {}, {"a": 1}]
FAMILIES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "gemma3_text": (
        NF4,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
        "all-linear",
    ),
    "qwen3_moe": (STACKED, MIXTURE, ATTENTION),
    "qwen3": (NF4, {"tie_word_embeddings": True}, "all-linear"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_with_every_wrong_value(tmp_path: pathlib.Path, family: str) -> None:
    to, changes, targets = FAMILIES[family]
    base = make_base(tmp_path, family, to, torch.bfloat16, **changes)
    case = Case(base, torch.bfloat16, packed(1), targets=targets)
    adapter = start(case, tmp_path / "adapter")
    want = native_steps(case, adapter, tmp_path)
    config = json.loads((base / "config.json").read_text())
    inputs = (base, adapter, tmp_path / "batches.safetensors", tmp_path / "out", tmp_path / "settings.json")
    command = [str(program("train_steps", "core/monograph/train")), *map(str, inputs)]
    trained = 0
    for path, value in hostile(config):
        (base / "config.json").write_text(json.dumps(changed(config, path, value)))
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        what = f"{path}: {value!r}: {done.returncode} {done.stderr}"
        assert done.returncode in (0, 1), what
        trained += done.returncode == 0
        # A shape that contradicts the config is named with both; a weight that is missing by its name.
        named = any(word in done.stderr for word in (path[-1], "config.json", "has no "))
        assert done.returncode == 0 or named, what
        if done.returncode == 0 and value not in (0, None):
            assert all(torch.isfinite(t).all() for t in load_file(tmp_path / "out").values()), what
    (base / "config.json").write_text(json.dumps(config))
    assert trained > 0
    got = native_steps(case, adapter, tmp_path)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # Of the older spelling transformers reads rope_type in this class, and passes over type.
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, 'rope_scaling is {"type"'),
        ({"quantization_config": "x"}, "quantization_config is 'x', wanted an object"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', wanted a number"),
    ],
)
def test_what_would_be_read_otherwise_is_refused(
    tmp_path: pathlib.Path, change: dict[str, Any], said: str
) -> None:
    base = make_base(tmp_path, "gemma3_text", NF4, torch.bfloat16)
    path = base / "config.json"
    config = json.loads(path.read_text())
    if "rope_scaling" in change:
        ropes = config.pop("rope_parameters")
        config |= {"rope_theta": ropes["full_attention"]["rope_theta"], "rope_local_base_freq": 1e4}
    path.write_text(json.dumps(config | change))
    done = subprocess.run(
        [program(), "generate", "--native", base, "--tokens", "1"], capture_output=True, text=True
    )
    assert done.returncode == 3, done.stderr
    assert said in done.stderr


def hostile(config: dict[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Each key of the config and of its objects, with each wrong value; and one that nobody knows."""
    paths = [(key,) for key in config if key != "quantization_config"] + [("no_such_key",)]
    for key, inner in config.items():
        if key.startswith("rope_") and isinstance(inner, dict):
            paths += [(key, name) for name in inner]
            paths += [
                (key, kind, name) for kind, own in inner.items() if isinstance(own, dict) for name in own
            ]
    return [(path, value) for path in paths for value in WRONG]


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if len(path) == 1:
        return config | {path[0]: value}
    return config | {path[0]: changed(config[path[0]], path[1:], value)}
