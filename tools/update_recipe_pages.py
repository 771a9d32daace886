"""Fills the tables of docs/recipes/*.md: memory and time of the recipes by model. Nothing is downloaded.

    python tools/update_recipe_pages.py [RECIPE ...]

Sizes are those of tests/python/support/hub_models.py. Base and adapter are counted on the meta device, as
loading and PEFT make them; activations are the peak of a checkpointed step whose tensors have no memory.
"""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python"))

from support.hub_models import MODELS, HubModel  # noqa: E402

RANK, TOKENS = 16, 2048
RATE = 0.85e12  # operations a second: an 8B step on 2 cores with AMX, bench/results/large_model.jsonl
HEAD = (
    "| model | base, GB | adapter, moments, gradients, GB | activations, GB | total, GB | "
    "TFLOP for 1,000 tokens | hours for a million tokens |\n|---|---|---|---|---|---|---|"
)
BLOCK = re.compile(r"(<!-- estimate -->\n).*?(<!-- end -->)", re.DOTALL)


def tuned_model(model: HubModel, *, memory: bool, layers: int | None = None) -> Any:
    """The packed base with the recipe's adapter, on the meta device or in memory that nobody writes to."""
    import yaml
    from peft import LoraConfig

    import monograph as mg
    from monograph.hf.transformers.activation_checkpointing import enable_checkpointing
    from monograph.hf.transformers.meta_model import meta_model

    keys = yaml.safe_load((ROOT / "recipes" / f"{model.recipe}.yml").read_text())
    skipped = ["lm_head", *model.not_packed] if model.not_packed else None
    packing = mg.MonographConfig(model.format, double_quant=model.format == "nf4", skip_modules=skipped)
    base = meta_model(model.full_config(layers), packing)
    if memory:
        base = base.to_empty(device="cpu")
        enable_checkpointing(base, {"use_reentrant": False})
    targets = keys.get("lora_target_modules") or "all-linear"
    return mg.add_lora(base, LoraConfig(r=RANK, target_modules=targets, task_type="CAUSAL_LM")).train()


def activations(model: HubModel) -> float:
    """GB of the peak of a step. Where layers repeat, of one and two periods of them: with checkpointing each
    further layer adds its input, and nothing else."""
    from monograph.training.fake_step import activation_bytes

    def peak(layers: int | None) -> int:
        return activation_bytes(tuned_model(model, memory=True, layers=layers), TOKENS)

    if not model.period:
        return round(peak(None) / 1e9, 2)
    one, two = max(model.period, 2), 2 * max(model.period, 2)
    first, second = peak(one), peak(two)
    return round((first + (model.layers - one) * (second - first) / (two - one)) / 1e9, 2)


def cells(model: HubModel, activations: float) -> list[str]:
    """A row of the table, from the activations in GB."""
    from monograph.distributed.model_sizes import read_sizes
    from monograph.distributed.plan import Mesh, Step, make_plan

    sizes = read_sizes(tuned_model(model, memory=False))
    plan = make_plan(sizes, Mesh(1, 1), Step(TOKENS, 1))
    trained = sum(plan.memory[name] for name in ("adapter", "moments", "gradients")) / 1e9
    base = sizes.base_bytes / 1e9
    work = plan.flops / TOKENS * 1000
    return [
        f"`{model.hub}`",
        f"{base:.2f}",
        f"{trained:.2f}",
        f"{activations:.2f}",
        f"{base + trained + activations:.1f}",
        f"{work / 1e12:.1f}",
        f"{work * 1000 / RATE / 3600:.1f}",
    ]


def main() -> None:
    for recipe in sys.argv[1:] or dict.fromkeys(model.recipe for model in MODELS):
        rows = [cells(model, activations(model)) for model in MODELS if model.recipe == recipe]
        table = "\n".join([HEAD, *(f"| {' | '.join(row)} |" for row in rows)])
        page = ROOT / "docs" / "recipes" / f"{recipe}.md"
        page.write_text(BLOCK.sub(rf"\g<1>{table}\n\g<2>", page.read_text()))
        print(f"{page.relative_to(ROOT)}: {len(rows)} models", flush=True)


if __name__ == "__main__":
    main()
