"""Recipes as the native trainer reads them: what PyYAML and `monograph train` read, or a refusal."""

from __future__ import annotations

import json
import pathlib
import random
import subprocess
from typing import Any

import pytest
import yaml

from monograph.recipe.config.read_config import ConfigError, _Loader, read_config
from support.native_tool import program, run
from support.recipe_files import make_model, make_tokenizer, write_jsonl


def native(texts: list[str], folder: pathlib.Path) -> list[dict[str, Any]]:
    path = folder / "texts"
    path.write_bytes("".join(f"{text}\0" for text in texts).encode())
    command = [str(program("read_recipe", "core/monograph/train")), str(path)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(texts)
    return found


def tagged(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: tagged(inside) for name, inside in value.items()}
    if isinstance(value, list):
        return ["list", *map(tagged, value)]
    return ["null" if value is None else type(value).__name__, value]


def pythons(text: str) -> Any:
    """What PyYAML reads, or the error that it raises."""
    try:
        value = yaml.load(text, _Loader)
    except Exception as error:  # a date that there is not is a ValueError, an odd key a TypeError
        return error
    return tagged({} if value is None else value)


def check_read_alike(texts: list[str], folder: pathlib.Path) -> int:
    """Every text that is accepted is read as PyYAML reads it; how many are."""
    accepted = 0
    for text, found in zip(texts, native(texts, folder), strict=True):
        if "error" not in found:
            assert found["value"] == pythons(text), text
            accepted += 1
    return accepted


SCALARS = [
    "1",
    "-3",
    "+4",
    "0",
    "-0",
    "007",
    "08",
    "1_000",
    "1__2_",
    "0x1f",
    "0b11",
    "0o7",
    "1:30",
    "12:30:45",
    "1:30.5",
    "9007199254740993",
    "2e-4",
    "2E+5",
    "1.5e3",
    "1.5e+3",
    "1.",
    ".5",
    "-.5",
    "+.5",
    "-0.5",
    "1_0.5_0",
    "1.e+5",
    ".",
    "..",
    "._",
    "_1",
    "-",
    "-a",
    "---",
    "+",
    "0.1.2",
    ".inf",
    "-.inf",
    ".nan",
    ".5e5",
    "true",
    "True",
    "TRUE",
    "tRUE",
    "yes",
    "No",
    "OFF",
    "on",
    "y",
    "n",
    "null",
    "Null",
    "~",
    "~/x",
    "NULL",
    "nUll",
    "2026-01-31",
    "2026-1-3",
    "2026-01",
    "2026-01-31-run",
    "=",
    "<<",
    "<a",
    "a<<",
    "a#b",
    "#a",
    "*a",
    "&a",
    "!a",
    "!!str",
    "@a",
    "`a",
    "%a",
    "|a",
    ">",
    "a:b",
    "a:",
    ":a",
    "?a",
    "a?",
    ",a",
    "a,",
    "[a]",
    "[]",
    "{}",
    "[a,b]",
    "[a,",
    "b,]",
    "[a,,b]",
    "[a",
    "b]",
    "{a:",
    "1}",
    "{a:1}",
    "{a}",
    "{a:",
    "}",
    "{a:",
    "[1,",
    "{b:",
    "'c'}]}",
    "{'a':1}",
    "[a:",
    "b]",
    "[[]]",
    "{a:",
    "1,",
    "a:",
    "2}",
    "[a,",
    "{b:",
    "c},",
    "'d,",
    "e']",
    "[-]",
    "[-",
    "a]",
    "[a#b]",
    "[a?]",
    "[http://x/y]",
    "'a'",
    '"a"',
    "'it''s'",
    '"\\n\\t\\"\\\\"',
    '"\\x41\\u00e4\\U0001F600"',
    '"\\q"',
    '"\\x4"',
    "'a'b",
    "'a",
    '"a',
    '"a"#b',
    "é",
    "日本",
    "a:\\b",
    "C:\\x",
    "\\d+\\.[qv]_proj",
    "(a|b)",
    "a,b",
    "a]b",
    "a}b",
    "e1",
    "1e",
    "1e5",
    "0e0",
    "00.5",
    "5e-324",
    "1e400",
    "99999999999999999999",
    ".1e+400",
]
SCALARS += ["a b", "a  b", "a #b", "'a: b'", "a: b", "a\tb", "'a\tb'", "[a, b] # c", "'a' # c", "'a' 'b'"]
SCALARS += [
    "{a: b, c: [d, {e: f}]}",
    "[ ]",
    "{ }",
    "[ a , b ]",
    "",
    " ",
    "- a",
    "'a\\nb'",
    "\u2028",
    "\x85",
    "\x07",
]
KEYS = ["a", "b", "'c'", '"d"', "e f", "on", "1", "~", "a.b", "é", "<<", "g ", "-h", "?", "a#", "null", "''"]


def test_each_scalar_in_each_place(tmp_path: pathlib.Path) -> None:
    frames = (
        "a: {}\n",
        "a:\n  {}\n",
        "a:\n- {}\n",
        "a: [x, {}]\n",
        "a: {{b: {}}}\n",
        "{}: 1\n",
        "a:\n  - {}: 2\n",
    )
    texts = [frame.format(scalar) for frame in frames for scalar in SCALARS]
    assert check_read_alike(texts, tmp_path) > 500


def made(draw: random.Random, depth: int, indent: int) -> str:
    """A block that begins behind `indent` blanks."""
    space, lines = " " * indent, []
    dashes = depth > 0 and draw.random() < 0.4
    for key in draw.sample(KEYS[:5] if draw.random() < 0.9 else KEYS, draw.randint(1, 3)):
        head = "-" if dashes else f"{key}:"
        if draw.random() < 0.3 and depth < 3:
            further = indent + draw.choice((0, 1, 2, 2, 2, 4))
            inner = made(draw, depth + 1, further)
            joined = dashes and draw.random() < 0.5
            lines.append(f"{space}{head} {inner.lstrip(' ')}" if joined else f"{space}{head}\n{inner}")
        else:
            lines.append(f"{space}{head} {draw.choice(SCALARS)}")
        if draw.random() < 0.1:
            lines.append(draw.choice(("", "# c", "   # c", "---", "...", " x", "\t", "  ")))
    return "\n".join(lines)


def test_made_documents(tmp_path: pathlib.Path) -> None:
    draw = random.Random(5)
    texts = [made(draw, 0, 0) + draw.choice(("", "\n", "\r\n")) for _ in range(4000)]
    for text in texts[:2000]:
        letters = list(text)
        for _ in range(draw.randint(1, 3)):
            letters[draw.randrange(len(letters))] = draw.choice(" \n:-#[]{},'\"&x0\t")
        texts.append("".join(letters))
    assert check_read_alike(texts, tmp_path) > 400


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("reader")
    make_tokenizer(root / "model")
    make_model(root / "model")
    run("quantize", root / "model", root / "nf4", "--to", "nf4")
    rows = [{"instruction": f"What is {n}?", "output": f"{n} dog " * (1 + n % 5)} for n in range(20)]
    write_jsonl(root / "train.jsonl", rows)
    return root


def least(world: pathlib.Path, without: str = "") -> str:
    lines = {
        "base_model": f"{world}/nf4",
        "adapter": "qlora",
        "lora_target_linear": "true",
        "datasets": f"[{{path: {world}/train.jsonl, type: instruction}}]",
    }
    return "".join(f"{name}: {value}\n" for name, value in lines.items() if name != without)


# A line, or several, that both read; what Python's recipe then differs in from one without it.
BOTH = [
    ("val_set_size: 0", {}),
    ("val_set_size: 0.0", {}),
    ("tf32: false", {}),
    ("tf32: true", {}),
    ("flash_attention:", {}),
    ("flash_attention: true", {}),
    ("max_steps: -1", {"max_steps": -1}),
    ("max_steps: 3", {"max_steps": 3}),
    ("seed: 1000000007", {"seed": 1000000007}),
    ("seed: 1_000", {"seed": 1000}),
    ("learning_rate: 2e-4", {}),
    ("learning_rate: 2.0e-4", {}),
    ("learning_rate: '0.0002'", {}),
    ("learning_rate: 1", {"learning_rate": 1.0}),
    ("lora_alpha: '8'", {"lora_alpha": 8.0}),
    ("sample_packing: yes", {"sample_packing": True}),
    ("sample_packing: On  # a comment", {"sample_packing": True}),
    ("save_strategy: no", {"save_strategy": "no"}),
    ("save_strategy: 'no'", {"save_strategy": "no"}),
    ("bf16: full", {"bf16": "full"}),
    ("bfloat16: true", {"bf16": True}),
    ('output_dir: "a b"', {"output_dir": "a b"}),
    ("gradient_checkpointing: unsloth", {"gradient_checkpointing": "unsloth"}),
    ("optimizer: adamw_bnb_8bit", {"optimizer": "adamw_bnb_8bit"}),
    ("special_tokens: {pad_token: <pad>}", {"special_tokens": {"pad_token": "<pad>"}}),
    ("special_tokens:\n  eos_token: </s>", {"special_tokens": {"eos_token": "</s>"}}),
    ("special_tokens:", {}),
    ("resume_from_checkpoint: off", {"resume_from_checkpoint": False}),
    ("saves_per_epoch: 0", {"saves_per_epoch": 0}),
    ("peft_use_dora: false\nload_best_model_at_end: false\nfp16: no", {}),
    ("wandb_project:\nwandb_entity:\nwandb_watch:\nwandb_name:\nwandb_log_model:", {}),
    ("deepspeed:\nfsdp:\nfsdp_config:\nlocal_rank:\nstrict: false\ndebug:\ngroup_by_length: false", {}),
    ("xformers_attention: false\ns2_attention: false\nearly_stopping_patience:", {}),
    (
        "evals_per_epoch:\neval_table_size:\nload_in_8bit: false\nlora_model_dir: null",
        {"load_in_8bit": False},
    ),
    ("lora_modules_to_save:\ntrust_remote_code: false\ngptq: false\nhub_model_id:", {}),
    ("lora_rank_pattern: {}\ntest_datasets: []\npeft: {}\nbnb_config_kwargs: {}\nrl:", {}),
    ("warmup_steps: 0\nwarmup_ratio: 0.1", {"warmup_steps": 0, "warmup_ratio": 0.1}),
    ("dataset_num_proc: 1", {"dataset_processes": 1}),
    ("adam_eps: 1e-9", {"adam_epsilon": 1e-9}),
    ("lora_target_modules: [q_proj, v_proj]", {"lora_target_modules": ["q_proj", "v_proj"]}),
    ("attn_implementation: flash_attention_2", {"attn_implementation": "flash_attention_2"}),
]
# What neither takes, or the native reader alone refuses (False).
REFUSED = [
    ("max_steps: 0", True),
    ("max_steps: -2", True),
    ("max_steps: 1e3", True),
    ("seed: 1.0", True),
    ("seed: -1", False),
    ("lora_r: 0x8", False),
    ("lora_r: true", True),
    ("sample_packing: 1", True),
    ("sample_packing: 'true'", True),
    ("output_dir: 7", True),
    ("output_dir: ~/x", False),
    ("output_dir: no", True),
    ("val_set_size: 0.1", False),
    ("torch_compile: true", False),
    ("bf16: true\nbfloat16: true", False),
    ("warmup_steps: 3\nwarmup_ratio: 0.1", True),
    ("lora_alpha: .inf", False),
    ("learning_rate: nan", True),
    ("special_tokens: x", True),
    ("lora_target_modules: all-linear", False),
    ("tokens: a", True),
    ("no_such_key: false", True),
    ("train_on_inputs: 1", True),
]


def native_accepts(text: str, folder: pathlib.Path) -> str:
    """What is wrong with the recipe; empty if it is the token file alone that is not there."""
    path = folder / "recipe.yml"
    path.write_text(text)
    done = subprocess.run(
        [str(program()), "finetune", str(path), "--tokens", str(folder / "none")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (2, 3, 5), done.stderr
    return "" if done.returncode == 5 and "none: cannot open" in done.stderr else done.stderr


def python_reads(text: str, folder: pathlib.Path) -> Any:
    (folder / "python.yml").write_text(text)
    return read_config(str(folder / "python.yml")).recipe


@pytest.mark.parametrize(("lines", "change"), BOTH, ids=[lines.splitlines()[0] for lines, _ in BOTH])
def test_what_both_read(
    world: pathlib.Path, tmp_path: pathlib.Path, lines: str, change: dict[str, Any]
) -> None:
    text = least(world) + lines + "\n"
    assert native_accepts(text, tmp_path) == ""
    plain = python_reads(least(world), tmp_path)
    assert vars(python_reads(text, tmp_path)) == vars(plain) | change


@pytest.mark.parametrize(("lines", "by_both"), REFUSED, ids=[lines for lines, _ in REFUSED])
def test_what_is_refused(world: pathlib.Path, tmp_path: pathlib.Path, lines: str, by_both: bool) -> None:
    text = least(world) + lines + "\n"
    said = native_accepts(text, tmp_path)
    assert "recipe.yml: " in said
    assert lines.split(":")[0] in said or "line" in said
    if by_both:
        with pytest.raises(ConfigError):
            python_reads(text, tmp_path)
