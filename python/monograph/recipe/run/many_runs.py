"""The adapters of a recipe as ManyStep takes them: one base, a run of each, and the first batches of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monograph.many.adapter_run import AdapterRun
from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.model_folder import model_folder
from monograph.recipe.data.encode import load_tokenizer
from monograph.recipe.data.prepare import prepare
from monograph.recipe.run.batches import Batches
from monograph.recipe.run.load_model import adapter_config, load_base, set_router_loss

Steps = Sequence[Sequence[Mapping[str, Any]]]


def runs_of(recipes: dict[str, Recipe]) -> tuple[Any, dict[str, AdapterRun], dict[str, Steps]]:
    """Base, runs, and of each adapter the micro-batches of its first two steps."""
    from monograph.hf.transformers.activation_checkpointing import enable_checkpointing

    first = next(iter(recipes.values()))
    folder = model_folder(first)
    tokenizer = load_tokenizer(first, folder)
    batches: dict[str, Steps] = {}
    for name, recipe in recipes.items():
        made = Batches(recipe, prepare(recipe, tokenizer).train, tokenizer.pad_token_id, training=True)
        last = min(1, made.sampler.steps(0) - 1)
        batches[name] = [made.step(0, 0), made.step(0, last)]
    base = load_base(first, folder)
    set_router_loss(first, base)
    if first.gradient_checkpointing:
        enable_checkpointing(base, {"use_reentrant": False})
    return base, {name: _run_of(recipe, base) for name, recipe in recipes.items()}, batches


def _run_of(recipe: Recipe, base: Any) -> AdapterRun:
    from peft import LoraConfig

    start = recipe.lora_model_dir
    config: Any = LoraConfig.from_pretrained(start) if start else adapter_config(recipe, base)
    config.inference_mode = False
    return AdapterRun(
        config,
        recipe.learning_rate,
        recipe.seed,
        recipe.max_grad_norm,
        recipe.weight_decay,
        (recipe.adam_beta1, recipe.adam_beta2),
        recipe.adam_epsilon,
        {"virtual_shards": recipe.leaves},
    )
