"""The keys of a recipe that trains several adapters on one base, and what an entry of `adapters` may say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monograph.recipe.config.key_row import Limit, free, key, words

_ALONE = free("each adapter is a run of its own, with checkpoints of its own")


@dataclass
class ManyKeys:
    """Keys that make several runs of a recipe; the recipe of one adapter has none of them."""

    adapters: list[dict[str, Any]] = key(
        [],
        "adapters trained together on one base: `{name: law, lora_r: 8}`, each into output_dir/name",
        _ALONE,
    )
    sweep: dict[str, list[Any]] = key(
        {}, "instead: lists of values, an adapter for each combination, named by them: lr2e-4-r8", _ALONE
    )
    sweep_stop: dict[str, Any] = key(
        {},
        "`{metric: eval_loss, after: 200, keep: 3}`: after so many steps all but the best so many end",
        _ALONE,
    )
    only: str | None = key(
        None,
        "one of the adapters, trained as all are but alone: `--only law`",
        _ALONE,
        once=True,
        limit=Limit(bool, "a name"),
    )


# What an adapter may have of its own: its factors, data and schedule, and when it is looked at and saved.
OWN = frozenset(
    words(
        {
            "factors": (
                "lora_model_dir lora_r lora_alpha lora_dropout lora_target_linear lora_target_modules "
                "lora_target_parameters lora_rank_pattern lora_alpha_pattern peft_use_rslora peft_use_dora "
                "peft_layers_to_transform peft_layers_pattern peft_init_lora_weights"
            ),
            "data": (
                "datasets test_datasets val_set_size shuffle_merged_datasets sequence_len sample_packing "
                "excess_length_strategy min_sample_len eval_sample_packing pad_to_sequence_len "
                "train_on_inputs chat_template chat_template_jinja chat_template_kwargs "
                "default_system_message eot_tokens"
            ),
            "schedule": (
                "seed micro_batch_size gradient_accumulation_steps virtual_shards eval_batch_size num_epochs "
                "max_steps learning_rate lr_scheduler cosine_min_lr_ratio warmup_ratio warmup_steps "
                "weight_decay adam_beta1 adam_beta2 adam_epsilon optim_args max_grad_norm"
            ),
            "output": (
                "logging_steps eval_strategy evals_per_epoch eval_steps save_strategy saves_per_epoch "
                "save_steps save_total_limit save_first_step load_best_model_at_end early_stopping_patience "
                "loss_watchdog_threshold loss_watchdog_patience max_bad_steps wandb_name calibration"
            ),
        }
    )
)

# What names made of values call these keys; others are written out.
SHORT = {
    "learning_rate": "lr",
    "lora_r": "r",
    "lora_alpha": "a",
    "lora_dropout": "p",
    "weight_decay": "wd",
    "max_grad_norm": "clip",
    "num_epochs": "ep",
    "seed": "s",
}

# Keys that change the base or what adapters on it would share; wherever they stand.
REFUSED_BESIDE: dict[str, str] = words(
    {
        "it trains tensors of the base, which all adapters share; train that one in a recipe of its own": (
            "lora_modules_to_save peft_trainable_token_indices tokens"
        ),
        "it limits the base of one run; leave it out": "base_memory",
        "it ends the run of one adapter; give `monograph merge` or `adapter` the folder of each": (
            "merge_lora serve_with"
        ),
        "it shards a base, which many adapters do not share yet; leave it out": (
            "shard_size replicate_size expert_parallel_size fsdp fsdp_config fsdp_version"
        ),
    }
)
