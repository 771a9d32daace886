"""Every command that a page shows is run here, by another test or stage, or docs/project/hosting.md lists it.

support/page_blocks.py says what a command is; scripts in other languages: test_page_scripts.py. Those run
here are run in the order of their page, in a folder with a small Llama under each name that the pages use.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model

import monograph as mg
from monograph.__main__ import main
from monograph.cli import native
from monograph.cli.plan_ranks import main as plan
from monograph.packing.__main__ import main as show_packing
from support.native_tool import ROOT, program, run
from support.page_blocks import PAGES, blocks, commands
from support.recipe_files import make_model, write_jsonl
from support.word_folders import Words, write_words

pytestmark = pytest.mark.slow
RECIPES = "|".join(path.stem for path in (ROOT / "recipes").glob("*.yml"))
CHAT = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
WITHOUT_PYTHON = "docs/how_to/train_without_python.md"  # whose recipe is of a packed base
HERE, SHELL, TEST, STAGE, NOT = "here", "here, by a shell", "test", "stage", "not run"

# The first that matches holds: what the command begins with, who runs it.
RULES = [
    (r"monograph \w+( \w+)? --help$|monograph --help$", TEST, "cli/test_cli.py"),
    (r"python -m monograph (train tiny/recipe.yml --output-dir tiny/sweep|sweep-report tiny/sweep)",
     TEST, "recipe/test_sweep_page.py"),
    (r"python -m monograph (example tiny|\w+ tiny/recipe)|monograph export tiny/",
     TEST, "recipe/test_recipe_learns.py"),
    (r"python -m monograph doctor --(device|verify)", TEST, "doctor/test_selftest.py"),
    (rf"python -m monograph (\w+ recipes/|(generate|merge) outputs/({RECIPES})\b)",
     TEST, "recipe/test_model_recipes.py"),
    (r"(torchrun|accelerate launch|monograph train recipe.yml --nproc)", SHELL, ""),
    (r"python tools/merge_quality.py --table", SHELL, ""),
    (r"python tools/merge_quality.py", NOT, "takes hours"),
    (r"python -m monograph\.bench", NOT, "measures: quiet machines only"),
    (r"\.ci/run (lint|release|installed|cuda|tsan)$", STAGE, "of this name"),
    (r"\.ci/run$", STAGE, "all of them"),
    (r"\.ci/install$", STAGE, "install"),
    (r"tools/gpu/self_test\.sh( --index-url|$)", STAGE, "gpu"),
    (r"\.ci/run before_commit$", NOT, "for developers"),
    (r"pytest$", STAGE, "python_tests"),
    (r"pytest -k", STAGE, "python_tests"),
    (r"ctest --preset release -R", STAGE, "release"),
    (r"cmake --preset release && cmake --build --preset release", STAGE, "release"),
    (r"cmake (--install build|-S monograph)", STAGE, "installed"),
    (r"pip wheel", STAGE, "wheel"),
    (r"pip install monograph_tool-", STAGE, "tool_wheel"),
    (r"pip install", NOT, "installs; `tools/release/clean_image.py` does, by hand"),
    (r"ls tiny/", TEST, "recipe/test_recipe_learns.py"),
    (r"python tools/check_tree.py$", STAGE, "lint"),
    (r"MONOGRAPH_PROVIDER=\S*flash-attn\S* python", NOT, "asks for a library that needs a card"),
    (r"MONOGRAPH_ISA=\S+ python -c|git grep|(cd \S+ && )?python - <<'END'", SHELL, ""),
    (r"python -c \"import", HERE, ""),
    (r"monograph(-tool)? |python -m monograph(\.packing|\.distributed)? ", HERE, ""),
]  # fmt: skip


def rule(command):
    for pattern, who, what in RULES:
        if re.match(pattern, command):
            return who, what
    return None, None


def run_here():
    return list(dict.fromkeys(each for each in commands() if rule(each[1])[0] in (HERE, SHELL)))


def test_someone_answers_for_every_command():
    found = list(commands())
    assert len(found) > 85
    assert [each for each in found if rule(each[1])[0] is None] == []
    lanes = "".join(path.read_text() for path in (ROOT / ".ci").glob("*.sh"))
    stages = set(re.findall(r"^(\w+)\(\)", lanes, re.MULTILINE))
    for _, who, what in RULES:
        if who == TEST:
            assert (ROOT / "tests" / "python" / what).exists(), what
        if who == STAGE and what not in ("of this name", "all of them"):
            assert what in stages, what


def test_what_another_test_runs_is_the_command_that_the_page_shows():
    """Those tests read one page each: a command of another page is one of theirs, to the letter."""
    by_test = {}
    for page, command in commands():
        if rule(command)[0] == TEST:
            by_test.setdefault(rule(command)[1], []).append((page, command))
    reads = {
        "recipe/test_recipe_learns.py": "docs/start/tutorial.md",
        "recipe/test_sweep_page.py": "docs/how_to/many_adapters.md",
        "recipe/test_model_recipes.py": "docs/recipes/",
        "cli/test_cli.py": "docs/reference/cli.md",
        "doctor/test_selftest.py": "docs/explain/gpu.md",
    }
    assert by_test.keys() == reads.keys()
    for test, found in by_test.items():
        run_there = {command for page, command in found if page.startswith(reads[test])}
        assert [each for each in found if each[1] not in run_there] == [], test


def test_pages_name_tests_that_exist():
    """`pytest FILE` and `pytest -k NAMES`, in prose too: pytest says nothing if a name of several is gone."""
    written = "".join(path.read_text() for path in (ROOT / "tests" / "python").rglob("*.py"))
    names = set(re.findall(r"^ *def (test_\w+)", written, re.MULTILINE))
    mentioned = {
        line for page in PAGES for line in re.findall(r"\bpytest (?:-k |tests/)[^`\n#]*", page.read_text())
    }
    assert len(mentioned) > 50
    for line in mentioned:
        for file in re.findall(r"\btests/[\w/]+\.py", line):
            assert (ROOT / file).exists(), line
        for chosen in re.findall(r"-k (\"[^\"]+\"|'[^']+'|\w+)", line):
            for word in set(re.findall(r"\w+", chosen)) - {"or", "and", "not"}:
                assert any(word in name for name in names), (line, word)


def test_blocks_are_commands_or_of_a_known_language():
    """Anything else would be run by nobody, and nobody would know."""
    known = {
        "",
        "text",
        "json",
        "python",
        "yaml",
        "cpp",
        "cmake",
    }  # all but the first two: test_page_scripts.py
    assert [str(block) for block in blocks() if block.language not in known] == []


def not_run():
    """The lines of the list in docs/project/hosting.md."""
    return sorted(
        {f"| `{command}` | {rule(command)[1]} |" for _, command in commands() if rule(command)[0] == NOT}
    )


def test_the_page_lists_what_nobody_runs():
    text = (ROOT / "docs" / "project" / "hosting.md").read_text()
    begin, end = "<!-- commands that are not run -->\n", "<!-- end -->"
    listed = text[text.index(begin) + len(begin) : text.index(end)].strip().splitlines()
    assert listed[2:] == not_run()


def printed(page, language):
    """The one block of this language of a page."""
    (text,) = [block.text for block in blocks() if (block.page, block.language) == (page, language)]
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with a tokenizer, adapters for it and data, by every name of the pages."""
    from monograph.recipe.run.example import make_tokenizer

    root = tmp_path_factory.mktemp("pages")
    tokenizer = make_tokenizer(str(root / "my-llama"))
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(root / "my-llama")
    for name in ("my-lora", "my-qlora", "math", "code"):
        torch.manual_seed(len(name))
        model = get_peft_model(
            make_model(root / "my-llama", max_position_embeddings=4096),
            LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False),
        )
        model.save_pretrained(root / name)
    plain = make_model(root / "my-llama", max_position_embeddings=4096)
    mg.calibrate(plain, [{"input_ids": torch.arange(64)[None]}], root / "my-lora")
    for method in ("gptq", "awq"):
        write_words(root / "my-llama", root / f"my-llama-{method}", Words(method, group=32))
    run("export", root / "my-llama", root / "my-llama-Q8_0.gguf", "--type", "q8_0")
    shutil.copytree(root / "my-lora", root / "lora_model")  # as unsloth saves it, by the name of its base
    settings = json.loads((root / "lora_model" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "unsloth/tiny-llama-bnb-4bit"
    (root / "lora_model" / "adapter_config.json").write_text(json.dumps(settings))
    for link, target in {"llama": "my-llama", "tiny-llama": "my-llama", "llama-nf4": "my-llama-nf4"}.items():
        (root / link).symlink_to(root / target)
    (root / "out").symlink_to(root / "my-lora")
    rows = [{"instruction": f"What is {i}?", "output": f" {i}"} for i in range(24)]
    write_jsonl(root / "train.jsonl", [*rows, json.loads(printed("docs/start/own_model.md", "json"))])
    pair = json.loads(printed("docs/how_to/preferences.md", "json"))
    write_jsonl(root / "pairs.jsonl", [pair | {"chosen": f"{pair['chosen']} {i}"} for i in range(24)])
    write_jsonl(root / "prompts.jsonl", [{"prompt": f"What is {i}?"} for i in range(24)])
    (root / "rewards.py").write_text(printed("docs/how_to/preferences.md", "python"))
    (root / "lengths.txt").write_text("\n".join(str(7 + 13 * i % 90) for i in range(50)))
    (root / "examples").symlink_to(ROOT / "examples")
    return root


def recipe(root):
    lines = ["base_model: my-llama", "load_in_4bit: true", "adapter: qlora", "lora_r: 4", "lora_alpha: 8"]
    lines += [
        "lora_target_linear: true",
        "datasets:",
        "  - {path: train.jsonl, type: alpaca}",
        "max_steps: 2",
    ]
    lines += ["sequence_len: 512", "micro_batch_size: 1", "learning_rate: 1e-3", "output_dir: outputs/out"]
    (root / "recipe.yml").write_text("\n".join(lines) + "\n")


def outputs(words):
    """The folders that a command of the native tool writes."""
    named = [words[i + 1] for i, word in enumerate(words) if word == "--out"]
    return [*named, words[3]] if words[1] in ("quantize", "dequantize", "convert") else named


def by_shell(command, root):
    """As printed, with this Python and the built tool first in the path; what reads the clone runs there."""
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), str(program().parent), env["PATH"]])
    where = ROOT if command.startswith(("git ", "cd ", "python tools/")) else root
    extra = " --max-steps 2" if " train " in command else ""
    done = subprocess.run(
        ["bash", "-c", command + extra],
        cwd=where,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", sorted({page for page, _ in run_here()}))
def test_the_commands_of_a_page_run(page, folder, tmp_path, monkeypatch):
    """In a copy of the folder: a command may not find what that of another page has left."""
    root = tmp_path / "pages"
    shutil.copytree(folder, root, symlinks=True)
    for link in (path for path in root.iterdir() if path.is_symlink()):
        target = os.readlink(link)
        link.unlink()
        link.symlink_to(target.replace(str(folder), str(root)))
    monkeypatch.chdir(root)
    # `python -m monograph merge` would become the native program, and take this process with it.
    monkeypatch.setattr(native, "exec_native", lambda arguments: run(*arguments).returncode)
    recipe(root)
    if page == WITHOUT_PYTHON:
        (root / "recipe.yml").write_text(printed(page, "yaml"))
    run("quantize", "my-llama", "my-llama-nf4", "--double-quant")
    for command in (command for each, command in run_here() if each == page):
        if rule(command)[0] == SHELL:
            by_shell(command, root)
            continue
        words = shlex.split(command)
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            for out in (root / name for name in outputs(words)):
                if out.is_dir():
                    shutil.rmtree(out)  # of the command before: nothing is overwritten without --force
            if words[0] in ("monograph", "monograph-tool"):
                run(*words[1:], code=CODES.get(words[1], 0), name=words[0])
            elif words[1] == "-c":
                exec(compile(words[2], command, "exec"), {})
            elif words[2] == "monograph.packing":
                show_packing(words[3:])
            elif words[2] == "monograph.distributed":
                plan(words[3:])
            else:
                extra = EXTRA.get(words[4], EXTRA.get(words[3], []))
                assert main([*words[3:], *extra]) in (0, None), f"{command}\n{said.getvalue()}"


CODES = {"diff": 4}  # they differ
# What a page leaves to the reader: shorter, and on this machine.
EXTRA = {
    "train": ["--max-steps", "2"],
    "generate": ["--max-new-tokens", "2"],
    "examples/dpo.yml": [],  # three steps; its evaluations are shares of an epoch
    "examples/grpo.yml": ["--max-steps", "1", "--trl.max_completion_length", "4"],
}
