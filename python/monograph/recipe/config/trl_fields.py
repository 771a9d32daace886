"""One table: the key of a recipe and the field of TRL's config that it sets.

A key that stands neither here nor in WITHOUT_FIELD is for Monograph's own trainer; written for TRL it is
refused, as is one whose field the chosen config does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monograph.recipe.config.trl_keys import TrlRecipe

FIELDS: dict[str, str] = {
    "output_dir": "output_dir",
    "seed": "seed",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "num_epochs": "num_train_epochs",
    "max_steps": "max_steps",
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "eval_sample_packing": "eval_packing",
    "pad_to_sequence_len": "pad_to_multiple_of",
    "pad_to_multiple_of": "pad_to_multiple_of",
    "dataset_processes": "dataset_num_proc",
    "shuffle_merged_datasets": "train_sampling_strategy",
    "group_by_length": "train_sampling_strategy",
    "bf16": "bf16",
    "fp16": "fp16",
    "router_aux_loss_coef": "router_aux_loss_coef",
    "optimizer": "optim",
    "optim_args": "optim_args",
    "optim_target_modules": "optim_target_modules",
    "learning_rate": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "lr_scheduler_kwargs": "lr_scheduler_kwargs",
    "cosine_min_lr_ratio": "lr_scheduler_kwargs",
    "warmup_ratio": "warmup_steps",
    "warmup_steps": "warmup_steps",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
    "neftune_noise_alpha": "neftune_noise_alpha",
    "noisy_embedding_alpha": "neftune_noise_alpha",
    "auto_find_batch_size": "auto_find_batch_size",
    "gradient_checkpointing": "gradient_checkpointing",
    "gradient_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "torch_compile": "torch_compile",
    "torch_compile_backend": "torch_compile_backend",
    "torch_compile_mode": "torch_compile_mode",
    "dataloader_num_workers": "dataloader_num_workers",
    "dataloader_pin_memory": "dataloader_pin_memory",
    "dataloader_prefetch_factor": "dataloader_prefetch_factor",
    "dataloader_drop_last": "dataloader_drop_last",
    "logging_steps": "logging_steps",
    "eval_strategy": "eval_strategy",
    "evals_per_epoch": "eval_steps",
    "eval_steps": "eval_steps",
    "save_strategy": "save_strategy",
    "saves_per_epoch": "save_steps",
    "save_steps": "save_steps",
    "save_total_limit": "save_total_limit",
    "save_only_model": "save_only_model",
    "load_best_model_at_end": "load_best_model_at_end",
    "metric_for_best_model": "metric_for_best_model",
    "greater_is_better": "greater_is_better",
    "hub_model_id": "hub_model_id",
    "hub_strategy": "hub_strategy",
    "hub_revision": "hub_revision",
    "report_to": "report_to",
    "wandb_name": "run_name",
    "mlflow_run_name": "run_name",
    "trackio_run_name": "run_name",
    "trackio_project_name": "project",
    "trackio_space_id": "trackio_space_id",
    "include_tokens_per_second": "include_num_input_tokens_seen",
    "rl_beta": "beta",
    "dpo_beta": "beta",
    "orpo_alpha": "beta",
    "dpo_loss_type": "loss_type",
    "dpo_loss_weights": "loss_weights",
    "dpo_label_smoothing": "label_smoothing",
    "dpo_use_weighting": "use_weighting",
    "precompute_ref_log_probs": "precompute_ref_log_probs",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "simpo_gamma": "simpo_gamma",
    "cpo_alpha": "cpo_alpha",
    "center_rewards_coefficient": "center_rewards_coefficient",
}

# Keys that Monograph follows itself: the model, its adapter, the data, what becomes of the run.
_OURS = """
    trainer rl reward_model trl num_labels base_model revision_of_model tokenizer_config load_in_4bit
    bnb_config_kwargs attn_implementation output_router_logits adapter lora_model_dir another_base
    lora_r lora_alpha lora_dropout lora_target_linear lora_target_modules lora_target_parameters
    lora_modules_to_save
    lora_rank_pattern lora_alpha_pattern peft_use_rslora peft_use_dora peft_layers_to_transform
    peft_layers_pattern peft_init_lora_weights peft datasets test_datasets val_set_size dataset_prepared_path
    chat_template chat_template_jinja chat_template_kwargs default_system_message eot_tokens special_tokens
    torch_compile_options step_mode early_stopping_patience loss_watchdog_threshold loss_watchdog_patience
    resume_from_checkpoint auto_resume_from_checkpoints wandb_project wandb_entity use_wandb use_tensorboard
    loraplus_lr_ratio loraplus_lr_embedding unfrozen_parameters streaming
    use_mlflow use_comet use_trackio merge_lora serve_with callbacks offload_folder device device_map
"""
WITHOUT_FIELD = frozenset(_OURS.split())
# The same, for documents alone: other trainers cut and mask answers themselves.
OF_DOCUMENTS = frozenset({"excess_length_strategy", "min_sample_len", "train_on_inputs"})

# Keys of one method; others have a field of the same name, or none.
OF_METHODS: dict[str, tuple[str, ...]] = {
    "dpo_loss_type": ("dpo", "ipo"),
    "dpo_loss_weights": ("dpo",),
    "dpo_label_smoothing": ("dpo",),
    "dpo_use_weighting": ("dpo", "ipo"),
    "orpo_alpha": ("orpo",),
    "kto_desirable_weight": ("kto",),
    "kto_undesirable_weight": ("kto",),
    "simpo_gamma": ("simpo",),
    "cpo_alpha": ("simpo",),
}

SCHEDULERS = {"wsd": "warmup_stable_decay"}
# What trl/optimizers.py makes by itself; the config is told a name that it knows.
OWN_SCHEDULERS = {"rex": "constant"}
OWN_OPTIMIZERS = {"muon": "adamw_torch"}
# axolotl's names of torchao's.
OPTIMIZERS = {"ao_adamw_8bit": "adamw_torch_8bit", "ao_adamw_4bit": "adamw_torch_4bit"}


def _rate(per_epoch: int | None, recipe: TrlRecipe) -> float | None:
    """As a share of all steps; None: at the end of each epoch, or not at all."""
    events = (per_epoch or 0) * recipe.num_epochs
    return 1 / events if events > 1 and per_epoch != 1 else None


def _sampling(recipe: TrlRecipe) -> str | None:
    if recipe.group_by_length:
        return "group_by_length"
    return None if recipe.shuffle_merged_datasets else "sequential"


def _scheduler(name: str, recipe: TrlRecipe) -> str:
    name = (SCHEDULERS | OWN_SCHEDULERS).get(name, name)
    return "cosine_with_min_lr" if name == "cosine" and recipe.cosine_min_lr_ratio is not None else name


def _arguments_of(given: Any, _: TrlRecipe) -> Any:
    return ",".join(f"{name}={value}" for name, value in given.items()) if isinstance(given, dict) else given


# What a value becomes where it is not taken as it is. None: TRL's own default stays.
CONVERTED: dict[str, Callable[[Any, TrlRecipe], Any]] = {
    "pad_to_sequence_len": lambda wanted, recipe: recipe.sequence_len if wanted else None,
    "shuffle_merged_datasets": lambda _, recipe: _sampling(recipe),
    "group_by_length": lambda _, recipe: _sampling(recipe),
    "bf16": lambda wanted, recipe: bool(wanted) and wanted != "full" and not recipe.fp16,
    "optimizer": lambda name, _: (OPTIMIZERS | OWN_OPTIMIZERS).get(name, name),
    "lr_scheduler": _scheduler,
    "optim_args": _arguments_of,
    "cosine_min_lr_ratio": lambda ratio, recipe: (
        {"min_lr_rate": ratio} if recipe.lr_scheduler == "cosine" else None
    ),
    "gradient_checkpointing": lambda wanted, _: bool(wanted),
    "gradient_checkpointing_kwargs": lambda given, _: {"use_reentrant": False, **given},
    "torch_compile": lambda wanted, _: wanted is True,
    "evals_per_epoch": _rate,
    "saves_per_epoch": _rate,
    "report_to": lambda _, recipe: recipe.trackers() or "none",
    "dpo_loss_type": lambda given, _: [given] if isinstance(given, str) else given,
}
