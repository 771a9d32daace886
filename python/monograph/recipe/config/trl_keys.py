"""The keys that a recipe has besides its own if TRL trains it: axolotl's names, and three of ours."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from monograph.recipe.config.keys import KEYS, DatasetKeys, Recipe, key
from monograph.recipe.config.trl_choose import METHODS, Method, method_of


@dataclass
class TrlDatasetKeys(DatasetKeys):
    """One entry of `datasets`, with the columns of preferences."""

    field_chosen: str | None = key(None, "chat_template.*: the column with the better answer; `chosen`")
    field_rejected: str | None = key(None, "chat_template.*: the column with the worse answer; `rejected`")
    field_completion: str | None = key(None, "chat_template.default for kto: the answer; `completion`; ours")
    field_label: str | None = key(None, "chat_template.default for kto: is it a good one? `label`; ours")


@dataclass
class TrlRecipe(Recipe):
    """A recipe that TRL trains."""

    lr_scheduler: str = key("cosine", "every scheduler of transformers; rex; wsd: warmup_stable_decay")  # type: ignore[assignment]
    unfrozen_parameters: list[str] | None = key(
        None, "without an adapter: patterns of the names of parameters to train; all by default"
    )
    streaming: bool | None = key(
        None, "rows are read and tokenised as they come, in the order of the files; wants max_steps"
    )
    # Preferences and rewards
    rl_beta: float | None = key(None, "how far from the reference: dpo, ipo, kto, orpo, simpo, grpo")
    dpo_beta: float | None = key(None, "an older name of rl_beta")
    dpo_loss_type: str | list[str] | None = key(None, "rl: dpo: a loss of DPOTrainer, or several, summed")
    dpo_loss_weights: list[float] | None = key(None, "rl: dpo: their weights")
    dpo_label_smoothing: float | None = key(
        None,
        "rl: dpo: share of the pairs that may be the wrong way round; robust, exo_pair, aot, aot_unpaired",
    )
    dpo_use_weighting: bool | None = key(None, "rl: dpo, ipo: WPO, pairs weighted by how likely they are")
    precompute_ref_log_probs: bool | None = key(None, "the reference runs once, before training")
    orpo_alpha: float | None = key(None, "rl: orpo: weight of the odds ratio")
    kto_desirable_weight: float | None = key(None, "rl: kto: weight of good answers")
    kto_undesirable_weight: float | None = key(None, "rl: kto: weight of bad ones")
    simpo_gamma: float | None = key(None, "rl: simpo: margin between the two rewards")
    cpo_alpha: float | None = key(
        None, "rl: simpo: weight of the loss on the better answer; TRL's default is 1, SimPO alone wants 0"
    )
    num_labels: int | None = key(None, "reward_model: 1")
    center_rewards_coefficient: float | None = key(None, "reward_model: keeps rewards around 0")
    trl: dict[str, Any] = key(
        {}, "fields of the trainer's config by TRL's names; `reward_funcs`: dotted names of functions"
    )
    # Training
    neftune_noise_alpha: float | None = key(None, "noise on the embeddings")
    noisy_embedding_alpha: float | None = key(None, "an older name of neftune_noise_alpha")
    loraplus_lr_ratio: float | None = key(None, "LoRA+: the rate of B is so many times learning_rate")
    loraplus_lr_embedding: float | None = key(None, "LoRA+: the rate of LoRA on embeddings; 1e-6")
    lr_scheduler_kwargs: dict[str, Any] | None = key(None, "arguments of the scheduler")
    optim_target_modules: str | list[str] | None = key(None, "layers of GaLore, APOLLO and kin")
    auto_find_batch_size: bool | None = key(None, "halves micro_batch_size until a step fits")
    pad_to_multiple_of: int | None = key(None, "length of a batch; pad_to_sequence_len: sequence_len")
    group_by_length: bool | None = key(None, "rows of one length in a batch")
    gradient_checkpointing_kwargs: dict[str, Any] | None = key(None, "use_reentrant is false by default")
    torch_compile_backend: str | None = key(None, "inductor, aot_eager, eager ...")
    dataloader_num_workers: int | None = key(None, "processes that make batches")
    dataloader_pin_memory: bool | None = key(None, "for devices with memory of their own")
    dataloader_prefetch_factor: int | None = key(None, "batches that each of them makes ahead")
    dataloader_drop_last: bool | None = key(None, "leaves out a last batch that is smaller")
    # Output
    save_only_model: bool | None = key(None, "checkpoints that cannot be resumed")
    metric_for_best_model: str | None = key(None, "what load_best_model_at_end goes by; eval_loss")
    greater_is_better: bool | None = key(None, "whether more of it is better")
    hub_model_id: str | None = key(None, "the adapter is uploaded under this name, privately")
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] | None = key(None, "when")
    hub_revision: str | None = key(None, "branch that it is uploaded to")
    include_tokens_per_second: bool | None = key(None, "counts tokens: `num_input_tokens_seen`")
    use_mlflow: bool = key(False, "report_to: mlflow")
    use_comet: bool = key(False, "report_to: comet_ml")
    use_trackio: bool = key(False, "report_to: trackio")
    mlflow_run_name: str | None = key(None, "name of the run")
    trackio_run_name: str | None = key(None, "name of the run")
    trackio_project_name: str | None = key(None, "project")
    trackio_space_id: str | None = key(None, "the Space that shows it")
    callbacks: list[str] | None = key(None, "dotted names of transformers' TrainerCallback classes; ours")

    @property
    def method_name(self) -> str:
        return method_of(self.rl, self.reward_model)

    @property
    def method(self) -> Method:
        return METHODS[self.method_name]

    def trackers(self) -> list[str]:
        more = {"mlflow": self.use_mlflow, "comet_ml": self.use_comet, "trackio": self.use_trackio}
        return list(dict.fromkeys([*super().trackers(), *(name for name, asked in more.items() if asked)]))


TRL_KEYS = {entry.name: entry for entry in fields(TrlRecipe) if entry.name not in KEYS}
