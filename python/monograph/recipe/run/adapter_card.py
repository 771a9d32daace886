"""README.md of an adapter: its base, data, recipe and losses, and how to load, merge and serve it.

Every figure is one of the run. PEFT writes a form to fill in under this name; it is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from monograph.recipe.config.keys import DatasetKeys, Recipe
from monograph.recipe.config.recipe_file import NAME as RECIPE_NAME

NAME = "README.md"
_LIBRARIES = ("monograph", "torch", "transformers", "peft")


def write_card(
    recipe: Recipe,
    folder: str,
    base_fingerprint: Mapping[str, Any],
    config: Any,
    lines: Sequence[Mapping[str, Any]],
) -> None:
    """config: PEFT's of the adapter; lines: those of metrics.jsonl so far."""
    base = base_fingerprint["base"]
    parts = [
        _front_matter(recipe),
        f"# LoRA adapter for {_base_name(recipe)}\n",
        _table(
            [
                ("base", f"`{recipe.base_model}`{_revision(recipe)}"),
                ("its hash", f"`{base['sha256']}` (`monograph inspect --hash`)"),
                ("trained on", _trained_on(base)),
                ("rank, alpha", f"{config.r}, {config.lora_alpha}{_kind(config)}"),
                ("layers", _layers(config)),
                *_losses(lines),
            ]
        ),
        "## Data\n",
        _table(_datasets(recipe.datasets), head=("file", "type")),
        "## Training\n",
        _table(_training(recipe, lines)),
        f"All keys are in [{RECIPE_NAME}]({RECIPE_NAME}); the figures of every step in `metrics.jsonl`.\n",
        "## Use\n",
        _use(recipe, base),
        f"Made with {', '.join(_versions())}.\n",
    ]
    with open(os.path.join(folder, NAME), "w", encoding="utf-8") as file:
        file.write("\n".join(parts))


def _front_matter(recipe: Recipe) -> str:
    tags = "".join(f"- {tag}\n" for tag in dict.fromkeys(["lora", str(recipe.adapter), "monograph"]))
    # A folder or file of this machine is no name on the Hub.
    local = os.path.exists(os.path.expanduser(recipe.base_model))
    named = "" if local else f"base_model: {recipe.base_model}\n"
    kind = "" if recipe.reward_model else "pipeline_tag: text-generation\n"
    return f"---\n{named}library_name: peft\n{kind}tags:\n{tags}---\n"


def _table(rows: Sequence[tuple[str, Any]], head: tuple[str, str] = ("", "")) -> str:
    cells = [head, ("---", "---"), *rows]
    return "".join(f"| {name} | {str(value).replace('|', chr(92) + '|')} |\n" for name, value in cells)


def _base_name(recipe: Recipe) -> str:
    return os.path.basename(os.path.normpath(recipe.base_model))


def _revision(recipe: Recipe) -> str:
    return f", revision {recipe.revision_of_model}" if recipe.revision_of_model else ""


def _trained_on(base: Mapping[str, Any]) -> str:
    packed = base.get("packed")
    if base["weights"] == "original":
        return "the weights as they are"
    if packed is None:
        return "quantised weights, of several formats"
    double = ", double quantisation" if packed["double_quant"] else ""
    return f"{packed['format']}, blocks of {packed['block']}{double}"


def _kind(config: Any) -> str:
    kinds = [name for name, used in (("DoRA", config.use_dora), ("rsLoRA", config.use_rslora)) if used]
    return "".join(f", {kind}" for kind in kinds)


def _layers(config: Any) -> str:
    """Names as short as PEFT's config has them: of layers 0 to 31 the last part counts once."""
    targets = config.target_modules
    if isinstance(targets, str):
        return f"`{targets}`"
    names = sorted({name.rpartition(".")[2] for name in targets or ()})
    names += [str(name) for name in config.target_parameters or ()]
    whole = [f"{name} (whole)" for name in config.modules_to_save or ()]
    tokens = ["rows of new or chosen tokens"] if config.trainable_token_indices else []
    return ", ".join([*names, *whole, *tokens])


def _losses(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    trained = [line for line in lines if "loss" in line]
    held = [line for line in lines if "eval_loss" in line]
    rows = []
    if trained:
        begun, ended = (f"{line['loss']:.4f} at step {line['step']}" for line in (trained[0], trained[-1]))
        rows.append(("loss", f"{begun}, {ended}"))
    if held:
        best = min(held, key=lambda line: line["eval_loss"])
        text = f"{held[-1]['eval_loss']:.4f}; best {best['eval_loss']:.4f} at step {best['step']}"
        rows.append(("loss on held back data", text))
    return rows


def _datasets(datasets: Sequence[DatasetKeys]) -> list[tuple[str, Any]]:
    def kind(entry: DatasetKeys) -> str:
        return entry.type if isinstance(entry.type, str) else "an instruction format of its own"

    def path(entry: DatasetKeys) -> str:
        local = os.path.exists(os.path.expanduser(entry.path))
        return os.path.basename(os.path.normpath(entry.path)) if local else entry.path

    return [(f"`{path(entry)}`", kind(entry)) for entry in datasets]


def _training(recipe: Recipe, lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    rows = recipe.micro_batch_size * recipe.gradient_accumulation_steps
    packed = ", packed" if recipe.sample_packing else ""
    activations = "float16" if recipe.fp16 else "bfloat16" if recipe.bf16 else "float32"
    found: list[tuple[str, Any]] = [
        ("steps", max((line["step"] for line in lines), default=0)),
        ("rows of a step", f"{rows} of {recipe.sequence_len} tokens{packed}"),
        ("learning rate", f"{recipe.learning_rate}, {recipe.lr_scheduler}"),
        ("optimizer", recipe.optimizer),
        ("seed", recipe.seed),
        ("activations", activations),
    ]
    if recipe.rl or recipe.reward_model:
        found.insert(0, ("method", recipe.rl or "reward model"))
    if recipe.lora_model_dir:
        found.insert(
            0, ("begun from the adapter", f"`{os.path.basename(os.path.normpath(recipe.lora_model_dir))}`")
        )
    return found


def _use(recipe: Recipe, base: Mapping[str, Any]) -> str:
    from monograph.hf.transformers.loading import stored_quantization

    packed = base.get("packed")
    wanted = ""
    if packed is not None and stored_quantization(base["folder"]) is None:
        double = f", double_quant={packed['double_quant']}" if recipe.adapter == "qlora" else ""
        wanted = f', mg.MonographConfig("{packed["format"]}"{double})'
    resize = more = ""
    if recipe.tokens or recipe.special_tokens:
        more = "from transformers import AutoTokenizer\n"
        resize = "model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(ADAPTER)))\n"
    return f"""\
BASE is the folder of the base, ADAPTER this folder.

```python
import monograph as mg
from peft import PeftModel
{more}
model = mg.from_pretrained(BASE{wanted})
{resize}model = PeftModel.from_pretrained(model, ADAPTER)
mg.optimize(model)
```

```
python -m monograph generate ADAPTER --prompt "..."
python -m monograph merge ADAPTER --out merged                                  # into the base
monograph adapter convert BASE ADAPTER --for vllm --out served                  # or sglang, llama.cpp
```

Commands compare the hash of the base with the one above.
"""


def _versions() -> list[str]:
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # a source tree that is not installed
            continue
    return found
