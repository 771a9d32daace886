"""`monograph generate --native` gives the tokens of transformers and PEFT, and refuses the rest by name."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import monograph as mg
from support.native_steps import ATTENTION, MIXTURE, STACKED, Case, make_base, start
from support.native_tool import program, run, run_json

NF4 = ("nf4", "--double-quant")
BF16, FP32 = torch.bfloat16, torch.float32
PROMPT = [5, 250, 17, 3, 99, 101, 42, 7, 200, 11, 64, 8]
NEW = 24
# Initial weights give logits of almost one size, whatever the prompt; these tell prompts apart.
SPREAD = {"initializer_range": 0.1}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("mistral", {"sliding_window": 7}),
    ("qwen2", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    # Its scaled embedding, were it also the head, would give the last token again.
    (
        "gemma3_text",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
]


def words(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


def native(base: pathlib.Path, adapter: pathlib.Path | None, *arguments: Any) -> list[int]:
    ours = () if adapter is None else ("--adapter", adapter)
    return run_json("generate", "--native", base, *ours, *arguments)["tokens"]


def greedy(model: Any, prompt: Sequence[int] = PROMPT) -> list[int]:
    ids = torch.tensor([prompt])
    model.eval()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, use_cache=True
        )
    return out[0, len(prompt) :].tolist()


def peer(base: pathlib.Path, adapter: pathlib.Path, folder: pathlib.Path, dtype: torch.dtype) -> Any:
    """transformers and PEFT on the values of the packed base."""
    dense = folder / "dequantized"
    if not dense.exists():
        run("dequantize", base, dense, "--to", "fp32")
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=dtype)
    return PeftModel.from_pretrained(model, str(adapter)).to(dtype)


def made(folder: pathlib.Path, family: str, dtype: torch.dtype, to: Any = NF4, **changes: Any) -> Any:
    base = make_base(folder, family, to, BF16, **(SPREAD | changes))
    return base, start(Case(base, dtype, []), folder / "adapter")


@pytest.mark.per_isa
@pytest.mark.parametrize(
    ("family", "changes"), FAMILIES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_tokens_of_transformers_and_peft(tmp_path: pathlib.Path, family: str, changes: Any) -> None:
    base, adapter = made(tmp_path, family, FP32, **changes)
    want = greedy(peer(base, adapter, tmp_path, FP32))
    assert len(set(want)) > 4  # not one token again and again
    for threads in (1, 2, 3):
        assert native(base, adapter, "--tokens", words(PROMPT), "--dtype", "fp32", "--threads", threads,
                      "--max-new-tokens", NEW) == want  # fmt: skip


def logits(base: pathlib.Path, adapter: pathlib.Path, dtype: str, out: pathlib.Path) -> torch.Tensor:
    arguments = (base, adapter, dtype, 2, out, *PROMPT)
    command = [str(program("decoder_logits", "core/monograph/train")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return load_file(out)["logits"]


@pytest.mark.per_isa
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("family", "changes"), FAMILIES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_logits_are_as_near_to_float64_as_those_of_transformers(
    tmp_path: pathlib.Path, family: str, changes: Any, dtype: torch.dtype
) -> None:
    base, adapter = made(tmp_path, family, dtype, **changes)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        want = peer(base, adapter, tmp_path, torch.float64)(ids).logits[0]
        theirs = peer(base, adapter, tmp_path, dtype)(ids).logits[0].double()
    ours = logits(base, adapter, {BF16: "bf16", FP32: "fp32"}[dtype], tmp_path / "logits.safetensors")
    assert (ours.double() - want).norm() <= 1.5 * (theirs - want).norm()


@pytest.mark.per_isa
def test_experts_answer_as_in_python(tmp_path: pathlib.Path) -> None:
    base = make_base(tmp_path, "qwen3_moe", STACKED, BF16, **MIXTURE)
    adapter = start(Case(base, FP32, [], targets=ATTENTION), tmp_path / "adapter")
    model: Any = PeftModel.from_pretrained(mg.from_pretrained(base, dtype=FP32), str(adapter))
    mg.optimize(model)
    want = greedy(model)
    assert len(set(want)) > 4  # not one token again and again
    for threads in (1, 3):
        assert native(base, adapter, "--tokens", words(PROMPT), "--dtype", "fp32", "--threads", threads,
                      "--max-new-tokens", NEW) == want  # fmt: skip
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT])).logits[0]
    assert torch.equal(logits(base, adapter, "fp32", tmp_path / "logits.safetensors"), theirs)


@pytest.mark.parametrize(
    "to",
    [("mxfp4",), ("mxfp8",), ("nvfp4",), ("fp8-block",), ("int4", "--asymmetric"), ("int8",), ("fp4",), None],
    ids=lambda to: to[0] if to else "bf16",
)
def test_every_base_answers_as_in_python(tmp_path: pathlib.Path, to: Any) -> None:
    """By the same kernels; a plain base and the head are torch's products there."""
    base, adapter = made(tmp_path, "llama", FP32, to, intermediate_size=256)
    model: Any = PeftModel.from_pretrained(mg.from_pretrained(base, dtype=FP32), str(adapter))
    mg.optimize(model)
    got = native(base, adapter, "--tokens", words(PROMPT), "--dtype", "fp32", "--max-new-tokens", NEW)
    assert got == greedy(model)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    return made(tmp_path_factory.mktemp("generate"), "llama", BF16)


DRAWN = ("--temperature", 1.5, "--top-p", 0.9, "--max-new-tokens", 40)


def test_the_same_seed_gives_the_same_tokens(world: tuple[pathlib.Path, pathlib.Path]) -> None:
    prompt = ("--tokens", words(PROMPT))
    drawn = [native(*world, *prompt, *DRAWN, "--seed", 7, "--threads", threads) for threads in (1, 2, 3)]
    assert drawn[0] == drawn[1] == drawn[2]
    assert native(*world, *prompt, *DRAWN, "--seed", 8) != drawn[0]
    assert native(*world, *prompt, *DRAWN) == native(*world, *prompt, *DRAWN, "--seed", 0)


def test_tokens_are_drawn_behind_others_however_these_came(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With AMX the attention of few queries rounds otherwise (core/monograph/train/decoder.h).
    monkeypatch.setenv("MONOGRAPH_ISA", "avx512")
    drawn = native(*world, "--tokens", words(PROMPT), *DRAWN, "--seed", 7)
    longer = ("--tokens", words(PROMPT + drawn[:9]))
    assert native(*world, *longer, *DRAWN[:4], "--max-new-tokens", 31, "--seed", 7) == drawn[9:]


def test_a_prompt_is_answered_as_it_is_alone(world: Any, tmp_path: pathlib.Path) -> None:
    prompts = [PROMPT, [1], list(range(100)), PROMPT]
    (tmp_path / "prompts").write_text("".join(f"{words(prompt)}\n" for prompt in prompts))
    ours = ("generate", "--native", world[0], "--adapter", world[1], *DRAWN)
    lines = run(*ours, "--prompt-ids", tmp_path / "prompts").stdout.splitlines()
    assert [[*map(int, line.split(","))] for line in lines] == [
        native(*world, *DRAWN, "--tokens", words(prompt)) for prompt in prompts
    ]
    (tmp_path / "prompts").write_text("5 250\t17\r\n")  # blanks do as well, and the end of a line of DOS
    assert run(*ours, "--prompt-ids", tmp_path / "prompts").stdout == lines_of(world, "5,250,17")


def lines_of(world: Any, tokens: str) -> str:
    return words(native(*world, *DRAWN, "--tokens", tokens)) + "\n"


def test_it_stops_behind_the_end(world: Any, tmp_path: pathlib.Path) -> None:
    prompt = ("--tokens", words(PROMPT), "--max-new-tokens", NEW)
    whole = native(*world, *prompt, "--stop-ids", 255)
    end = next(i for i in range(3, NEW) if whole[i] not in whole[:i])
    told = run_json(
        "generate", "--native", world[0], "--adapter", world[1], *prompt, "--stop-ids", whole[end]
    )
    assert told == {"schema_version": 1, "prompt": PROMPT, "tokens": whole[: end + 1], "stopped": True}
    base = shutil.copytree(world[0], tmp_path / "base")
    (base / "generation_config.json").unlink()  # what it says goes first
    for file, ends in (("config.json", whole[end]), ("generation_config.json", [254, whole[end]])):
        path = base / file
        config = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(config | {"eos_token_id": ends}))
        assert native(base, world[1], *prompt) == whole[: end + 1]
        path.write_text(json.dumps(config | {"eos_token_id": "x"}))
        said = run("generate", "--native", base, *prompt, code=3).stderr
        assert f"{file}: eos_token_id is" in said
        path.write_text(json.dumps(config | {"eos_token_id": None}))


def test_the_base_alone(world: Any) -> None:
    prompt = ("--tokens", words(PROMPT), "--max-new-tokens", NEW, "--dtype", "fp32")
    model = AutoModelForCausalLM.from_pretrained(world[0].parent / "dense", dtype=FP32)
    dense = native(world[0].parent / "dense", None, *prompt)
    assert dense == greedy(model)
    assert native(world[0], None, *prompt) != native(*world, *prompt)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", ""], "wanted --tokens IDS or --prompt-ids FILE, one of the two"),
        (["--tokens", "  "], "--tokens: the prompt is empty, wanted one token or more"),
        (["--tokens", " , "], "--tokens: '' is no token, wanted whole numbers"),
        (["--tokens", "1,,2"], "--tokens: '' is no token"),
        (["--tokens", "1,2,"], "--tokens: '' is no token"),
        (["--tokens", "1", "--prompt-ids", "x"], "one of the two"),
        (["--tokens", "1,256"], "--tokens: token 256, wanted 0 to 255, the vocabulary of the base"),
        (["--tokens", "1,-2"], "--tokens: '-2' is no token, wanted whole numbers"),
        (["--tokens", "1,2x"], "'2x' is no token"),
        (["--tokens", "1 0x2"], "'0x2' is no token"),
        (["--tokens", "1.5"], "'1.5' is no token"),
        (["--tokens", "99999999999999999999"], "is no token"),
        (["--tokens", "4611686018427387904"], "token 4611686018427387904, wanted 0 to 255"),
        (["--tokens", words([1] * 512)], "512 tokens and 1 new ones, wanted 512 together at most"),
        (["--tokens", words([1] * 600)], "600 tokens and 1 new ones, wanted 512 together at most"),
        (["--tokens", "1,2", "--max-new-tokens", "511"], "2 tokens and 511 new ones, wanted 512 together"),
        (["--tokens", "1", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--tokens", "1", "--temperature", "-1"], "--temperature: -1: wanted at least 0"),
        (["--tokens", "1", "--temperature", "nan"], "--temperature: nan: wanted a finite number"),
        (["--tokens", "1", "--top-p", "0"], "--top-p: is 0, wanted more than 0, at most 1"),
        (["--tokens", "1", "--top-p", "1.01"], "--top-p: is 1.01"),
        (["--tokens", "1", "--top-p", "nan"], "--top-p: is nan"),
        (["--tokens", "1", "--seed", "-1"], "--seed: is -1, wanted a whole number"),
        (["--tokens", "1", "--dtype", "fp16"], "--dtype"),
        (["--tokens", "1", "--threads", "0"], "--threads"),
        (["--tokens", "1", "--stop-ids", "end"], "--stop-ids: 'end' is no token"),
        (["--prompt-ids", "no such file"], "--prompt-ids: 'no such file' cannot be read"),
        (["--prompt-ids", "/"], "--prompt-ids: '/' is a folder, wanted a file of prompts"),
        (["--prompt-ids", "/dev/null"], "--prompt-ids: '/dev/null' is empty"),
    ],
)
def test_a_wrong_command_line(world: Any, arguments: list[str], said: str) -> None:
    stderr = run("generate", "--native", world[0], "--adapter", world[1], *arguments, code=2).stderr
    assert said in stderr, stderr


def test_lines_of_prompts_are_named(world: Any, tmp_path: pathlib.Path) -> None:
    for text, said in (("1\n\n2\n", "line 2: the prompt is empty"), ("1\n2,x\n", "line 2: 'x' is no token"),
                       ("1\n2\n300", "line 3: token 300"), ("\x1b[2J", "line 1: '\\x1b[2J' is")):  # fmt: skip
        (tmp_path / "prompts").write_text(text)
        ours = ("generate", "--native", world[0], "--prompt-ids", tmp_path / "prompts")
        assert f"--prompt-ids: {said}" in run(*ours, code=2).stderr


def test_another_base_is_refused(world: Any, tmp_path: pathlib.Path) -> None:
    adapter = shutil.copytree(world[1], tmp_path / "adapter")
    asked = ("--adapter", adapter, "--tokens", "1,2", "--max-new-tokens", 2)
    sha = json.loads(run("inspect", world[0], "--json", "--hash").stdout).get("sha256", "0" * 64)
    record = {"schema_version": 1, "base": {"sha256": sha, "weights": "dequantized"}}
    (adapter / "monograph.json").write_text(json.dumps(record))
    run("generate", "--native", world[0], *asked)
    dense = world[0].parent / "dense"
    said = run("generate", "--native", dense, *asked, code=3).stderr
    assert f"was trained on the base with hash {sha}" in said
    run("generate", "--native", dense, *asked, "--another-base")


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        ("self_attn.q_proj.lora_A.other.weight", "this kind of tensor is not known"),
        ("self_attn.q_proj.lora_C.weight", "this kind of tensor is not known"),
        ("self_attn.x_proj.lora_A.weight", "has no lora_"),
        ("self_attn.q_proj.lora_embedding_A", "q_proj has the factors of an embedding"),
    ],
)
def test_unknown_tensors_of_an_adapter(world: Any, tmp_path: pathlib.Path, rename: str, said: str) -> None:
    adapter = shutil.copytree(world[1], tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    at = "base_model.model.model.layers.0."
    tensors[at + rename] = tensors.pop(f"{at}self_attn.q_proj.lora_A.weight")
    save_file(tensors, adapter / "adapter_model.safetensors")
    asked = ("--adapter", adapter, "--tokens", "1,2", "--max-new-tokens", 2)
    assert said in run("generate", "--native", world[0], *asked, code=3).stderr


def test_a_config_without_a_limit_is_refused(world: Any, tmp_path: pathlib.Path) -> None:
    base = shutil.copytree(world[0], tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    del config["max_position_embeddings"]
    (base / "config.json").write_text(json.dumps(config))
    said = run("generate", "--native", base, "--tokens", "1", code=3).stderr
    assert "config.json: max_position_embeddings is missing" in said
