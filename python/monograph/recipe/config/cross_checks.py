"""Rules about keys together, and about values that mean another thing here."""

from __future__ import annotations

import os

from monograph.memory.base_memory.sizes import bytes_of
from monograph.packing.packed_rows import LARGEST_CAPACITY
from monograph.recipe.config.adapter_start import check_start_keys, start_of
from monograph.recipe.config.data_checks import check_data
from monograph.recipe.config.device_keys import check_device, device_type
from monograph.recipe.config.event_keys import check_events
from monograph.recipe.config.keys import Recipe
from monograph.recipe.config.offload_keys import check_offload
from monograph.recipe.config.recipe_file import NAME as REMEMBERED
from monograph.recipe.config.sharding_keys import check_sharding
from monograph.recipe.config.trl_keys import TrlRecipe
from monograph.recipe.config.whole_model import check_whole_model

# Every AdamW is the same AdamW here: moments of an adapter are small, so they are kept in 32 bits.
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "paged_adamw_32bit")
SMALLER_ADAMW = (
    "adamw_8bit",
    "adamw_bnb_8bit",
    "adamw_torch_4bit",
    "adamw_torch_8bit",
    "paged_adamw_8bit",
    "adamw_apex_fused",
    "adamw_anyprecision",
)
OWN_ATTENTION = (
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
    "xformers",
    "sage",
    "sdpa_varlen",
    "kernels-community/",  # kernels of attention by their name on the Hub
)
QUANT_KWARGS = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")


def check_together(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Errors and notices about a recipe whose keys are each of the right type."""
    errors: list[str] = []
    notices: list[str] = []
    _check_model(recipe, errors, notices)
    errors += check_start_keys(recipe)
    check_data(recipe, errors, notices)
    _check_training(recipe, errors, notices)
    _check_step_mode(recipe, errors)
    _check_serving(recipe, notices)
    errors += check_device(recipe)
    wrong, told = check_sharding(recipe)
    return errors + wrong, notices + told


def _check_model(recipe: Recipe, errors: list[str], notices: list[str]) -> None:
    if not recipe.base_model:
        errors.append("base_model: missing; write the folder of the model")
    elif _looks_local(recipe.base_model) and not os.path.isfile(f"{recipe.base_model}/config.json"):
        made = recipe.output_dir
        known = os.path.isfile(os.path.join(made, REMEMBERED))
        hint = f"; {made} holds an adapter with its own recipe: write {made} for this file" if known else ""
        errors.append(
            f"base_model: {recipe.base_model} has no config.json; wanted the folder of a model{hint}"
        )
    start = recipe.lora_model_dir
    if start and _looks_local(start) and not os.path.isfile(f"{start}/adapter_config.json"):
        errors.append(f"lora_model_dir: {start} has no adapter_config.json; wanted the folder of an adapter")
    whole = recipe.adapter is None and isinstance(recipe, TrlRecipe)
    if isinstance(recipe, TrlRecipe):
        errors += check_whole_model(recipe)
    elif recipe.adapter is None:
        errors.append(
            "adapter: missing; only adapters are trained, the base stays frozen: write adapter: qlora; or "
            "trainer: trl, which trains the weights of a 16-bit base"
        )
    if whole and not errors:
        notices.append(
            "adapter: missing; the weights themselves are trained"
            + (", in bfloat16, which loses small changes; write bf16: false" if recipe.bf16 else "")
        )
    if recipe.adapter == "qlora" and recipe.load_in_4bit is False:
        errors.append("adapter is qlora and load_in_4bit false; write adapter: lora for a 16-bit base")
    if recipe.adapter == "lora" and recipe.load_in_4bit:
        errors.append("adapter is lora and load_in_4bit true; write adapter: qlora")
    if recipe.fp16 and recipe.bf16 in (True, "full"):
        errors.append(f"fp16 is true and bf16 {str(recipe.bf16).lower()}; write one of the two")
    _check_base_memory(recipe, errors)
    _check_expert_targets(recipe, errors)
    if recipe.router_aux_loss_coef is not None and not recipe.output_router_logits:
        errors.append(
            f"router_aux_loss_coef is {recipe.router_aux_loss_coef} without output_router_logits; write "
            "output_router_logits: true, or leave both out"
        )
    targets = recipe.lora_target_linear or recipe.lora_target_modules or recipe.lora_target_parameters
    if not (targets or recipe.lora_model_dir or recipe.adapter is None):
        errors.append("lora_target_modules: missing; write lora_target_linear: true for all linear layers")
    trains_tables = recipe.lora_modules_to_save or recipe.peft_trainable_token_indices
    if recipe.peft_ensure_weight_tying and not (trains_tables or recipe.lora_target_modules):
        notices.append(
            "peft_ensure_weight_tying: ignored; neither embedding nor head is trained: write "
            "lora_modules_to_save: [embed_tokens, lm_head]"
        )
    for name, value in recipe.bnb_config_kwargs.items():
        if name not in QUANT_KWARGS:
            errors.append(f"bnb_config_kwargs.{name}: not supported; allowed are {', '.join(QUANT_KWARGS)}")
        elif name == "bnb_4bit_quant_type" and value not in ("nf4", "fp4"):
            errors.append(f"bnb_config_kwargs.{name} is {value!r}, wanted nf4 or fp4")
        elif name == "bnb_4bit_use_double_quant" and not isinstance(value, bool):
            errors.append(f"bnb_config_kwargs.{name} is {value!r}, wanted true or false")
    kind = device_type(recipe)
    if kind not in ("cpu", "cuda") and recipe.attention == "monograph":
        packs = recipe.sample_packing or recipe.packs_evaluation
        notices.append(
            f"attn_implementation: on {kind} packed rows are computed with every score: bounded and slow"
            if packs
            else f"attn_implementation: monograph has no kernel on {kind}; sdpa is taken"
        )
    if recipe.attn_implementation.startswith(OWN_ATTENTION):
        notices.append(
            f"attn_implementation: {recipe.attn_implementation} is done by Monograph's own attention"
        )
    elif recipe.attn_implementation not in ("monograph", "sdpa", "eager"):
        errors.append(f"attn_implementation is {recipe.attn_implementation}, wanted monograph, sdpa or eager")
    elif recipe.attention != recipe.attn_implementation:
        notices.append(
            f"attn_implementation: {recipe.attn_implementation} would build a dense mask for packed rows; "
            "Monograph's own attention is taken"
        )


def _check_base_memory(recipe: Recipe, errors: list[str]) -> None:
    if recipe.base_memory is None:
        return
    try:
        bytes_of(recipe.base_memory)
    except ValueError as error:
        errors.append(str(error))
    if recipe.shard_size is not None or recipe.fsdp or recipe.fsdp_config:
        errors.append(
            "base_memory and a sharded base (shard_size, fsdp): a rank holds its part in memory already; "
            "write one of the two"
        )
    if (kind := device_type(recipe)) != "cpu":
        errors.append(f"base_memory and the device {kind}: the base is mapped on a CPU; leave one out")
    start, _ = start_of(recipe)
    if isinstance(start, str) and start.startswith(("pissa", "loftq", "olora")):
        errors.append(
            f"base_memory and the start {start}: it makes a base of its own in memory; leave one out"
        )


def _check_expert_targets(recipe: Recipe, errors: list[str]) -> None:
    """What PEFT has not for LoRA on parameters."""
    if not recipe.lora_target_parameters:
        return
    for name, value, wanted in (
        ("lora_dropout", recipe.lora_dropout, 0.0),
        ("peft_use_dora", recipe.peft_use_dora, False),
    ):
        if value != wanted:
            found = str(value).lower()
            errors.append(
                f"{name} is {found} and lora_target_parameters are given; PEFT wants {wanted} for them"
            )
    if isinstance(recipe.peft_init_lora_weights, str) and recipe.peft_init_lora_weights != "gaussian":
        errors.append(
            f"peft_init_lora_weights is {recipe.peft_init_lora_weights} and lora_target_parameters are "
            "given; their start is PEFT's own: leave it out"
        )


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or os.path.exists(path)


def _check_training(recipe: Recipe, errors: list[str], notices: list[str]) -> None:
    if isinstance(recipe, TrlRecipe):
        pass  # transformers has more: see trl/check_values.py
    elif recipe.optimizer in SMALLER_ADAMW:
        notices.append(
            f"optimizer: {recipe.optimizer} is AdamW with 32-bit moments here; an adapter's are small"
        )
    elif recipe.optimizer not in ADAMW:
        errors.append(
            f"optimizer is {recipe.optimizer}, only AdamW is in the graph; write adamw_torch; or write "
            "trainer: trl"
        )
    for name in (
        "micro_batch_size",
        "gradient_accumulation_steps",
        "ddp_timeout",
        "sequence_len",
        "lora_r",
        "logging_steps",
        "max_bad_steps",
    ):
        if getattr(recipe, name) < 1:
            errors.append(f"{name} is {getattr(recipe, name)}, wanted 1 or more")
    if recipe.calibration_rows < 0:
        errors.append(f"calibration is {recipe.calibration}, wanted true, false or a number of rows")
    if recipe.virtual_shards is not None and recipe.virtual_shards < 1:
        errors.append(f"virtual_shards is {recipe.virtual_shards}, wanted 1 or more")
    for name in ("learning_rate", "num_epochs", "lora_alpha"):
        if getattr(recipe, name) <= 0:
            errors.append(f"{name} is {getattr(recipe, name)}, wanted more than 0")
    for name in ("lora_dropout", "warmup_ratio", "cosine_min_lr_ratio", "adam_beta1", "adam_beta2"):
        value = getattr(recipe, name)
        if value is not None and not 0 <= value < 1:
            errors.append(f"{name} is {value}, wanted 0 or more and less than 1")
    if recipe.lr_scheduler not in ("cosine", "rex") and recipe.cosine_min_lr_ratio is not None:
        errors.append(f"cosine_min_lr_ratio: lr_scheduler is {recipe.lr_scheduler}, wanted cosine or rex")
    if recipe.val_set_size < 0:
        errors.append(
            f"val_set_size is {recipe.val_set_size}, wanted a share below 1 or a number of documents"
        )
    for one, other in (
        ("warmup_ratio", "warmup_steps"),
        ("evals_per_epoch", "eval_steps"),
        ("saves_per_epoch", "save_steps"),
    ):
        if getattr(recipe, one) and getattr(recipe, other):
            errors.append(f"{one} and {other} say the same thing in two ways; leave one out")
    evaluates = bool(recipe.val_set_size or recipe.test_datasets)
    for name in ("load_best_model_at_end", "early_stopping_patience"):
        if getattr(recipe, name) and not evaluates:
            errors.append(f"{name}: nothing is evaluated; write val_set_size: 0.05 and evals_per_epoch: 1")
    if (recipe.evals_per_epoch or recipe.eval_steps) and not evaluates:
        notices.append("evals_per_epoch: ignored; val_set_size is 0, so there is nothing to evaluate")
    errors += check_events(recipe)
    if recipe.warmup_steps is not None:
        steps = recipe.warmup_steps
        if steps < 0 or (steps > 1 and steps != int(steps)):
            errors.append(f"warmup_steps is {steps}, wanted a number of steps, or a share below 1")
    if recipe.sequence_len > LARGEST_CAPACITY:
        errors.append(f"sequence_len is {recipe.sequence_len}, wanted 1 to {LARGEST_CAPACITY}")
    check_offload(recipe, errors, notices)


def _check_step_mode(recipe: Recipe, errors: list[str]) -> None:
    if recipe.step_mode not in (None, "eager") and recipe.torch_compile is False:
        errors.append(
            f"step_mode is {recipe.step_mode} and torch_compile false, so nothing is compiled; leave one out"
        )
    if recipe.step_mode in ("graph", "regions", "eager") and recipe.wants_inductor:
        errors.append(
            f"step_mode is {recipe.step_mode}, which generates no code, and {recipe.wants_inductor} asks for "
            "Inductor's; leave one out, or write step_mode: inductor"
        )


def _check_serving(recipe: Recipe, notices: list[str]) -> None:
    if recipe.serve_with is not None:
        notices.extend(
            f"serve_with: {recipe.serve_with} cannot load {feature} from an adapter; merge it"
            for feature in features_not_served(recipe)
        )


def features_not_served(recipe: Recipe) -> list[str]:
    """What no server but PEFT loads from an adapter; `monograph adapter convert` takes care of the rest."""
    doubts = {
        "DoRA (peft_use_dora)": recipe.peft_use_dora,
        "whole layers (lora_modules_to_save)": bool(recipe.lora_modules_to_save),
        "trained tokens (peft_trainable_token_indices)": bool(recipe.peft_trainable_token_indices),
    }
    return [feature for feature, used in doubts.items() if used]
