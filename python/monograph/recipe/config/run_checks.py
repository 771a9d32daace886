"""Checks of keys together: data, training, events, the step, the device and the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from monograph.packing.packed_rows import LARGEST_CAPACITY
from monograph.recipe.config.activation_checks import check_tiled_mlp
from monograph.recipe.config.dataset_keys import check_entries
from monograph.recipe.config.expert_checks import check_expert_parallel
from monograph.recipe.config.key_row import Said, check_limits, concerns
from monograph.recipe.config.keys import Recipe, TrlRecipe
from monograph.recipe.config.placement import (
    device_type,
    offload_place,
    parsed_device,
    wants_fsdp,
    written_device,
)

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


CHAT_TEMPLATES = ("tokenizer_default", "chatml", "jinja", "tokenizer_default_fallback_chatml")
SPECIAL_TOKENS = ("pad_token", "eos_token", "bos_token", "unk_token", "additional_special_tokens")


# Entries of fsdp_config (axolotl's and, behind `fsdp_`, accelerate's) that change nothing here, and why.
_WITHOUT_EFFECT = {
    "version": "there is one way of sharding",
    "cpu_ram_efficient_loading": "each rank reads its own bytes of the files",
    "sync_module_states": "each rank reads its own bytes of the files",
    "use_orig_params": "trained parameters stay whole",
    "limit_all_gathers": "the graph has one gather a layer",
    "forward_prefetch": "the graph has one gather a layer",
    "backward_prefetch": "the graph has one gather a layer",
    "transformer_layer_cls_to_wrap": "the units are the decoder layers",
    "state_dict_type": "rank 0 writes a whole adapter",
    "final_state_dict_type": "rank 0 writes a whole adapter",
    "cpu_offload_pin_memory": "there is one device",
}
_LAYERS = "the units are the decoder layers; write TRANSFORMER_BASED_WRAP, or leave it out"
_HYBRID = "write shard_size (ranks that share one copy) and replicate_size (copies) instead of fsdp"
_NEVER_KEPT = "gathered layers are never kept for backward; write full_shard, or reshard_after_forward: true"
_OFFLOAD = "the base is in host memory already, a share of it on each rank"

# Values that mean what is done here, and what to write for others.
_WORDS: dict[str, tuple[dict[Any, str | None], str]] = {
    "reshard_after_forward": ({True: None, False: _NEVER_KEPT}, "true"),
    "offload_params": ({False: None, True: None}, "true or false"),
    "auto_wrap_policy": (
        {"TRANSFORMER_BASED_WRAP": None, "SIZE_BASED_WRAP": _LAYERS, "NO_WRAP": _LAYERS},
        "TRANSFORMER_BASED_WRAP",
    ),
    "sharding_strategy": (
        {
            "FULL_SHARD": None,
            "SHARD_GRAD_OP": _NEVER_KEPT,
            "NO_SHARD": "leave fsdp and fsdp_config out: ranks then share the mapped base",
            "HYBRID_SHARD": _HYBRID,
            "HYBRID_SHARD_ZERO2": _HYBRID,
        },
        "FULL_SHARD",
    ),
}
# Entries that are followed or need not be, and those that are refused whatever their value.
FSDP_ENTRIES = (*_WORDS, *_WITHOUT_EFFECT, "activation_checkpointing", "mixed_precision_policy")
FSDP_REFUSED = ("min_num_params",)
# The words of the older key `fsdp`.
_LEGACY: dict[str, str | None] = {
    "full_shard": None,
    "auto_wrap": None,
    "shard_grad_op": _NEVER_KEPT,
    "offload": None,
    "hybrid_shard": _HYBRID,
    "hybrid_shard_zero2": _HYBRID,
}


@concerns(
    "optimizer calibration lr_scheduler cosine_min_lr_ratio val_set_size test_datasets warmup_ratio "
    "warmup_steps evals_per_epoch eval_steps saves_per_epoch save_steps load_best_model_at_end "
    "early_stopping_patience sequence_len"
)
def check_training(recipe: Recipe, said: Said) -> None:
    errors, notices = said.errors, said.notices
    if isinstance(recipe, TrlRecipe):
        pass  # transformers has more: see trl_checks.py
    elif recipe.optimizer in SMALLER_ADAMW:
        notices.append(
            f"optimizer: {recipe.optimizer} is AdamW with 32-bit moments here; an adapter's are small"
        )
    elif recipe.optimizer not in ADAMW:
        errors.append(
            f"optimizer is {recipe.optimizer}, only AdamW is in the graph; write adamw_torch; or write "
            "trainer: trl"
        )
    errors += check_limits(recipe)
    if recipe.calibration_rows < 0:
        errors.append(f"calibration is {recipe.calibration}, wanted true, false or a number of rows")
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
    if recipe.warmup_steps is not None:
        steps = recipe.warmup_steps
        if steps < 0 or (steps > 1 and steps != int(steps)):
            errors.append(f"warmup_steps is {steps}, wanted a number of steps, or a share below 1")
    if recipe.sequence_len > LARGEST_CAPACITY:
        errors.append(f"sequence_len is {recipe.sequence_len}, wanted 1 to {LARGEST_CAPACITY}")


@concerns("step_mode torch_compile")
def check_step_mode(recipe: Recipe, said: Said) -> None:
    errors = said.errors
    if recipe.step_mode not in (None, "eager") and recipe.torch_compile is False:
        errors.append(
            f"step_mode is {recipe.step_mode} and torch_compile false, so nothing is compiled; leave one out"
        )
    if recipe.step_mode in ("graph", "eager") and recipe.wants_inductor:
        errors.append(
            f"step_mode is {recipe.step_mode}, which generates no code, and {recipe.wants_inductor} asks for "
            "Inductor's; leave one out, or write step_mode: inductor"
        )


@concerns("providers device device_map")
def check_providers(recipe: Recipe, said: Said) -> None:
    """An operator that there is, by somebody who computes it on the device, and is installed."""
    from monograph.ops.providers import PORTABLE, check_asked, row, why_missing

    where = device_type(recipe)
    for operator, provider in (recipe.providers or {}).items():
        names = {*row(operator, where), PORTABLE}
        problems = check_asked({operator: provider})
        if not problems and provider not in names:
            problems = [f"{operator} by {provider} on {where}, wanted one of {', '.join(sorted(names))}"]
        if not problems and (reason := why_missing(provider, asked=True)) is not None:
            problems = [f"{operator} by {provider}: {reason}"]
        said.errors += [f"providers: {problem}" for problem in problems]


@concerns(
    "val_set_size test_datasets eval_strategy evals_per_epoch eval_steps save_strategy saves_per_epoch "
    "save_steps load_best_model_at_end save_first_step early_stopping_patience"
)
def check_events(recipe: Recipe, said: Said) -> None:
    """What contradicts, as axolotl has it: a strategy beside other keys of the same thing."""
    said.errors += _events(recipe)


def _events(recipe: Recipe) -> Iterable[str]:
    evaluates = bool(recipe.val_set_size or recipe.test_datasets)
    for strategy, per_epoch, every in (
        ("eval_strategy", "evals_per_epoch", "eval_steps"),
        ("save_strategy", "saves_per_epoch", "save_steps"),
    ):
        word = getattr(recipe, strategy)
        written = [name for name in (per_epoch, every) if getattr(recipe, name)]
        if word in ("no", "epoch", "best") and written:
            yield (
                f"{strategy} is {word} and {written[0]} {getattr(recipe, written[0])}; leave one of the two "
                "out"
            )
        if word == "steps" and not written:
            yield f"{strategy} is steps, and {every} is missing; write {every}: 500"
        if word not in (None, "no") and strategy == "eval_strategy" and not evaluates:
            yield f"{strategy} is {word}: nothing is evaluated; write val_set_size: 0.05, or leave it out"
    if recipe.save_strategy == "best" and not evaluates:
        yield "save_strategy is best: nothing is evaluated; write val_set_size: 0.05 and evals_per_epoch: 1"
    for name in ("load_best_model_at_end", "save_first_step"):
        if recipe.save_strategy == "no" and getattr(recipe, name):
            yield f"save_strategy is no and {name} true, which wants checkpoints; leave one of the two out"
    if recipe.eval_strategy == "no":
        for name in ("load_best_model_at_end", "early_stopping_patience"):
            if getattr(recipe, name):
                yield f"eval_strategy is no and {name} goes by evaluations; leave one of the two out"


@concerns("gradient_checkpointing offload_folder step_mode device")
def check_offload(recipe: Recipe, said: Said) -> None:
    """Where what a forward keeps waits for its backward."""
    errors, notices = said.errors, said.notices
    place, written = offload_place(recipe), f"gradient_checkpointing: {recipe.gradient_checkpointing}"
    kind = device_type(recipe)
    if recipe.gradient_checkpointing == "unsloth":
        notices.append(f"{written} is plain recomputation here; write offload_disk to offload")
    if recipe.gradient_checkpointing == "offload" and place == "disk":
        notices.append(f"{written}: activations are in host memory (cpu) already, so it means offload_disk")
    if recipe.offload_folder is not None and place != "disk":
        errors.append(
            "offload_folder: no file is written, so it would do nothing; write gradient_checkpointing: "
            "offload_disk beside it"
        )
    if place is not None and recipe.mode in ("whole_step", "inductor_whole_step"):
        errors.append(
            f"{written} with step_mode: {recipe.mode}: a whole step has no border between forward and "
            "backward; write step_mode: graph or inductor"
        )
    if place == "disk" and kind != "cpu" and recipe.mode in ("graph", "inductor"):
        errors.append(
            f"{written} with device: {kind} and step_mode: {recipe.mode}: the graph of another device "
            "offloads to host memory only; write gradient_checkpointing: offload"
        )


@concerns("device device_map shard_size fsdp fsdp_config")
def check_device(recipe: Recipe, said: Said) -> None:
    """Errors that need no such device: a recipe may be read and its data prepared on another machine."""
    try:
        kind = parsed_device(written_device(recipe)).type
    except ValueError as error:
        said.errors.append(str(error))
        return
    if kind != "cpu" and ((recipe.shard_size or 1) > 1 or wants_fsdp(recipe)):
        said.errors.append(
            f"device is {kind}, and a base is sharded among ranks on the CPU only; leave one out"
        )


@concerns("fsdp fsdp_config fsdp_version shard_size gradient_checkpointing bf16 fp16")
def check_sharding(recipe: Recipe, said: Said) -> None:
    """What needs no processes."""
    errors, notices = said.errors, said.notices
    words = [recipe.fsdp] if isinstance(recipe.fsdp, str) else recipe.fsdp
    for word in " ".join(words).lower().split() if isinstance(words, list) else ():
        errors += _refused("fsdp", word, _LEGACY, "full_shard")
    for written, value in recipe.fsdp_config.items():
        errors += _wrong_entry(recipe, written, value)
    if recipe.fsdp_version not in (None, 1, 2):
        errors.append(f"fsdp_version is {recipe.fsdp_version}, wanted 2")
    elif recipe.fsdp_version is not None and not wants_fsdp(recipe):
        notices.append("fsdp_version: ignored; without fsdp_config nothing is sharded: write shard_size")
    if wants_fsdp(recipe):
        if recipe.shard_size == 1:
            errors.append("shard_size is 1 and fsdp shards the base; leave one of the two out")
        notices += _offloading(recipe)
        notices.append(
            "fsdp: the packed base is sharded across the ranks; on one host ranks without fsdp share the "
            "pages of the mapped base, which takes less memory"
        )


def _offloading(recipe: Recipe) -> list[str]:
    """What FSDP would move to the host; a base is sharded on CPUs alone (check_device)."""
    words = [recipe.fsdp] if isinstance(recipe.fsdp, str) else recipe.fsdp
    named = (
        ["fsdp: offload"] if isinstance(words, list) and "offload" in " ".join(words).lower().split() else []
    )
    named += [
        f"fsdp_config.{name}"
        for name, value in recipe.fsdp_config.items()
        if name.removeprefix("fsdp_") == "offload_params" and value
    ]
    return [f"{name}: {_OFFLOAD}; base_memory bounds what of a base is in memory" for name in named]


def _wrong_entry(recipe: Recipe, written: str, value: Any) -> list[str]:
    """What is wrong with an entry of fsdp_config."""
    name, where = written.removeprefix("fsdp_"), f"fsdp_config.{written}"
    if name in _WITHOUT_EFFECT:
        return []
    if name in _WORDS:
        return _refused(where, value, *_WORDS[name])
    if name == "activation_checkpointing":
        missing = value and not recipe.gradient_checkpointing
        return [f"{where}: not supported; write gradient_checkpointing: true"] if missing else []
    if name == "min_num_params":
        return [f"{where}: not supported; {_LAYERS}"] if value else []
    if name == "mixed_precision_policy":
        own = "fp16" if recipe.fp16 else "bf16" if recipe.bf16 else "no"
        alike = value in (own, {"no": "fp32", "bf16": "bfloat16", "fp16": "float16"}[own])
        return [] if alike else [f"{where} is {value}, and bf16 and fp16 mean {own}; leave it out"]
    return [f"{where}: unknown; known are {', '.join(sorted(FSDP_ENTRIES))}"]


def _refused(where: str, value: Any, meanings: dict[Any, str | None], wanted: str) -> list[str]:
    found = str(value).lower() if isinstance(value, bool) else value
    if not isinstance(value, bool | str) or value not in meanings:
        return [f"{where} is {found}, wanted {wanted}"]
    instead = meanings[value]
    return [] if instead is None else [f"{where} is {found}: not supported; {instead}"]


@concerns("datasets test_datasets val_set_size pad_to_sequence_len sample_packing")
def check_data(recipe: Recipe, said: Said) -> None:
    if not recipe.datasets:
        said.errors.append("datasets: missing; write `- path: train.jsonl` and `type: alpaca` below it")
    said.errors += check_entries(recipe)
    if recipe.test_datasets and recipe.val_set_size:
        said.errors.append("test_datasets and val_set_size both say what to evaluate on; leave one out")
    if recipe.pad_to_sequence_len is False and recipe.sample_packing:
        said.notices.append(
            "pad_to_sequence_len: ignored; packed rows have one length, or each packing would be compiled"
        )


@concerns("special_tokens")
def check_special_tokens(recipe: Recipe, said: Said) -> None:
    errors = said.errors
    for name, value in recipe.special_tokens.items():
        if name not in SPECIAL_TOKENS:
            errors.append(f"special_tokens.{name}: unknown; wanted one of {', '.join(SPECIAL_TOKENS)}")
            continue
        several = name == "additional_special_tokens"
        tokens = value if several and isinstance(value, list) else [None if several else value]
        if not all(isinstance(token, str) and token for token in tokens):
            wanted = "a list of tokens" if several else "a token"
            errors.append(f"special_tokens.{name} is {value!r}, wanted {wanted}")


@concerns("datasets test_datasets chat_template chat_template_jinja")
def check_templates(recipe: Recipe, said: Said) -> None:
    errors, notices = said.errors, said.notices
    entries = [*recipe.datasets, *recipe.test_datasets]
    named = {"chat_template": recipe.chat_template} | {
        f"{where}.{number}.chat_template": entry.chat_template
        for where in ("datasets", "test_datasets")
        for number, entry in enumerate(getattr(recipe, where))
    }
    for where, name in named.items():
        if name not in (None, *CHAT_TEMPLATES):
            notices.append(f"{where}: {name} is taken from the tokenizer; none is shipped by name")
        if name == "jinja" and not recipe.chat_template_jinja:
            errors.append(
                f"{where} is jinja and chat_template_jinja is missing; write the template or its file"
            )
    names = {entry.chat_template or recipe.chat_template for entry in entries} or {recipe.chat_template}
    if recipe.chat_template_jinja and not names & {None, "jinja"}:
        errors.append(
            f"chat_template_jinja: chat_template is {sorted(map(str, names))[0]}, so it would do nothing; "
            "write chat_template: jinja, or leave one out"
        )


@concerns(
    "datasets test_datasets chat_template chat_template_jinja chat_template_kwargs default_system_message "
    "eot_tokens train_on_inputs eval_sample_packing val_set_size"
)
def check_unread(recipe: Recipe, said: Said) -> None:
    """Keys of the recipe that none of its datasets reads."""
    if recipe.rows == "documents":
        said.notices += _unread(recipe)


def _unread(recipe: Recipe) -> Iterable[str]:
    entries = [*recipe.datasets, *recipe.test_datasets]
    kinds = {"mapping" if isinstance(entry.type, dict) else entry.type.split(".")[0] for entry in entries}
    if kinds and "chat_template" not in kinds:
        chat = ("chat_template", "chat_template_jinja", "chat_template_kwargs", "default_system_message")
        for name in (*chat, "eot_tokens"):
            if getattr(recipe, name):
                yield f"{name}: no dataset is of chats, so `generate` alone goes by it"
    if recipe.train_on_inputs and kinds <= {"completion", "input_output"} and kinds:
        yield f"train_on_inputs: ignored; type {' and '.join(sorted(kinds))} says itself what is a target"
    if recipe.eval_sample_packing is not None and not (recipe.val_set_size or recipe.test_datasets):
        yield "eval_sample_packing: ignored; nothing is evaluated"


RUN_CHECKS = (
    check_data,
    check_special_tokens,
    check_templates,
    check_unread,
    check_training,
    check_events,
    check_offload,
    check_tiled_mlp,
    check_step_mode,
    check_providers,
)
PLACE_CHECKS = (check_device, check_sharding, check_expert_parallel)
