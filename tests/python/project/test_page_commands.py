"""Every command that a page shows is run here, by another test or stage, or docs/project/hosting.md lists it.

A command is a line of a block without a language that begins with a program. Those that are run here are
run in the order of their page, in a folder with a small Llama under each name that the pages use.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model

from monograph.__main__ import main
from monograph.cli import native
from monograph.packing.__main__ import main as show_packing
from support.native_tool import ROOT, run
from support.recipe_files import make_model, write_jsonl

pytestmark = pytest.mark.slow
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PROGRAMS = (
    r"python(?= -)|pip|monograph(?:-tool)?|cmake|ctest|pytest|\.ci/\w+|torchrun|twine|debootstrap|sudo"
    r"|PYTHONPATH=\S+"
)
COMMAND = re.compile(rf"^(?:\$ )?((?:{PROGRAMS})(?: .*)?)$")
RECIPES = "|".join(path.stem for path in (ROOT / "recipes").glob("*.yml"))
CHAT = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
HERE, TEST, STAGE, NOT = "here", "test", "stage", "not run"

# The first that matches holds: what the command begins with, who runs it.
RULES = [
    (r"monograph \w+( \w+)? --help$|monograph --help$", TEST, "cli/test_cli.py"),
    (r"python -m monograph (example tiny|\w+ tiny/recipe)", TEST, "recipe/test_recipe_learns.py"),
    (r"python -m monograph doctor --(device|verify)", TEST, "doctor/test_selftest.py"),
    (rf"python -m monograph (\w+ recipes/|(generate|merge) outputs/({RECIPES})\b)",
     TEST, "recipe/test_model_recipes.py"),
    (r"python -m monograph\.distributed ", TEST, "distributed/test_scale.py"),
    (r"(torchrun|monograph train recipe.yml --nproc)", TEST, "recipe/test_recipe_over_ranks.py"),
    (r"python tools/merge_quality.py", NOT, "takes hours"),
    (r"python -m monograph\.bench", NOT, "measures: quiet machines only"),
    (r"\.ci/run (lint|release|installed|cuda|tsan)$", STAGE, "of this name"),
    (r"\.ci/run$", STAGE, "all of them"),
    (r"\.ci/install$", STAGE, "install"),
    (r"\.ci/run before_commit$", NOT, "for developers"),
    (r"pytest$", STAGE, "python_tests"),
    (r"pytest -k", STAGE, "python_tests"),
    (r"ctest --preset release -R", STAGE, "release"),
    (r"cmake --preset release && cmake --build --preset release", STAGE, "release"),
    (r"cmake (--install build|-S monograph)", STAGE, "installed"),
    (r"pip wheel", STAGE, "wheel"),
    (r"pip install monograph_tool-", STAGE, "tool_wheel"),
    (r"pip install", NOT, "installs; `tools/release/clean_image.py` does, by hand"),
    (r"python -c \"import", HERE, ""),
    (r"monograph(-tool)? |python -m monograph|python -m monograph\.packing", HERE, ""),
]  # fmt: skip


def commands():
    """(page, command) in order; a comment behind the command is left out."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for line in (line for language, block in blocks if not language for line in block.splitlines()):
            # Output of the programs' own help begins like a command too.
            if (match := COMMAND.match(line)) and "COMMAND" not in line and not line.endswith("<<'END'"):
                yield str(page.relative_to(ROOT)), re.sub(r"\s+#.*", "", match[1]).strip()


def rule(command):
    for pattern, who, what in RULES:
        if re.match(pattern, command):
            return who, what
    return None, None


def run_here():
    return list(dict.fromkeys(each for each in commands() if rule(each[1])[0] == HERE))


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
    shutil.copytree(root / "my-lora", root / "lora_model")  # as unsloth saves it, by the name of its base
    settings = json.loads((root / "lora_model" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "unsloth/tiny-llama-bnb-4bit"
    (root / "lora_model" / "adapter_config.json").write_text(json.dumps(settings))
    for link, target in {"llama": "my-llama", "tiny-llama": "my-llama", "llama-nf4": "my-llama-nf4"}.items():
        (root / link).symlink_to(root / target)
    (root / "out").symlink_to(root / "my-lora")
    rows = [{"instruction": f"What is {i}?", "output": f" {i}"} for i in range(24)]
    write_jsonl(root / "train.jsonl", rows)
    chat = [{"role": "user", "content": "What is 7?"}]
    write_jsonl(
        root / "pairs.jsonl", [{"messages": chat, "chosen": f" {i}", "rejected": " no"} for i in range(24)]
    )
    write_jsonl(root / "prompts.jsonl", [{"prompt": f"What is {i}?"} for i in range(24)])
    (root / "rewards.py").write_text(
        "def short(completions, **columns):\n    return [-float(len(text)) for text in completions]\n"
    )
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
    here = [command for each, command in run_here() if each == page]
    if not any(command.startswith("monograph quantize") for command in here):
        run("quantize", "my-llama", "my-llama-nf4", "--double-quant")
    for command in sorted(here, key=lambda command: "quantize" not in command):
        words = shlex.split(command)
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            for out in (root / words[i + 1] for i, word in enumerate(words) if word == "--out"):
                if out.is_dir():
                    shutil.rmtree(out)  # of the command before: nothing is overwritten without --force
            if words[0] in ("monograph", "monograph-tool"):
                run(*words[1:], code=CODES.get(words[1], 0), name=words[0])
            elif words[1] == "-c":
                exec(compile(words[2], command, "exec"), {})
            elif words[2] == "monograph.packing":
                show_packing(words[3:])
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
