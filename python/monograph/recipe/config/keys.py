"""The recipe: the native keys and those that TRL's engine adds, with what keys mean together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from monograph.recipe.config import trl_arguments as convert
from monograph.recipe.config.dataset_keys import DATASET_KEYS, PREFERENCES, DatasetKeys, TrlDatasetKeys
from monograph.recipe.config.key_row import TOLD, both, free, handed, ignored, refused, rows_of, with_trl
from monograph.recipe.config.meanings import of_adapted_layers
from monograph.recipe.config.native_keys import KEYS, NativeKeys
from monograph.recipe.config.trl_choose import METHODS, Method, Rows, method_of

__all__ = ["DATASET_KEYS", "KEYS", "TRL_KEYS", "DatasetKeys", "Recipe", "TrlDatasetKeys", "TrlRecipe"]

# What Monograph's own engine says of keys that are TRL's.
REWARDS = refused("it is for reward models, which TRL trains; write reward_model: true")
UPLOAD = with_trl("upload output_dir with `hf upload`")
BATCHES = ignored("batches are made between steps in microseconds")
TRACKER = ignored("write report_to with the tracker's name; its project is wandb_project")
# Why a resumed run may have another value.
SPEED = free("where and how fast things are made and written; no step depends on it")


@dataclass
class Recipe(NativeKeys):
    """All keys that are honoured, with the values of one run."""

    @property
    def rows(self) -> Rows:
        """What a row of its data is."""
        return "documents"

    def trackers(self) -> list[str]:
        """The trackers asked for by any of the keys, each once."""
        named = [self.report_to] if isinstance(self.report_to, str) else self.report_to or []
        named = [name for name in named if name not in ("none", "")]
        named += ["wandb"] * bool(self.wandb_project or self.use_wandb)
        return list(dict.fromkeys(named + ["tensorboard"] * self.use_tensorboard))

    @property
    def wants_inductor(self) -> str | None:
        """The key that asks for Inductor's code, besides step_mode."""
        if self.torch_compile is True:
            return "torch_compile: true"
        asked = self.torch_compile_mode and "torch_compile_mode"
        return asked or (self.torch_compile_options and "torch_compile_options") or None

    @property
    def mode(self) -> str:
        """The mode of the step that these keys mean together; run_checks.py refuses what contradicts."""
        if self.torch_compile is False:
            return "eager"
        written = "graph" if self.step_mode is None else str(self.step_mode)
        generated = {"graph": "inductor", "whole_step": "inductor_whole_step"}
        return generated.get(written, written) if self.wants_inductor else written

    @property
    def offloads(self) -> bool:
        """Whether what a forward keeps leaves memory for a file."""
        return self.gradient_checkpointing in ("offload", "offload_disk")

    @property
    def leaves(self) -> int:
        """Virtual shards of a step."""
        return self.virtual_shards or self.gradient_accumulation_steps

    @property
    def calibration_rows(self) -> int:
        """Rows that the calibration reads, 0 for none."""
        return 16 if self.calibration is True else int(self.calibration)

    @property
    def attention(self) -> str:
        """The attention that runs: other names than these two, and packed rows, mean Monograph's."""
        plain = self.attn_implementation in ("sdpa", "eager")
        packs = self.sample_packing or self.packs_evaluation
        return self.attn_implementation if plain and not packs else "monograph"

    @property
    def packs_evaluation(self) -> bool:
        return self.sample_packing if self.eval_sample_packing is None else self.eval_sample_packing


@dataclass
class TrlRecipe(Recipe):
    """A recipe that TRL trains: the keys that it adds, axolotl's names and one of ours."""

    lr_scheduler: str = handed(
        "cosine",
        "every scheduler of transformers; rex; wsd: warmup_stable_decay",
        TOLD,
        to="lr_scheduler_type",
        value=convert.to_scheduler,
    )  # type: ignore[assignment]
    unfrozen_parameters: list[str] | None = both(
        None,
        "without an adapter: patterns of the names of parameters to train; all by default",
        own=with_trl("write lora_modules_to_save: the base is frozen"),
        meaning=of_adapted_layers,
    )
    streaming: bool | None = both(
        None,
        "rows are read and tokenised as they come, in the order of the files; wants max_steps",
        own=with_trl("leave it out: prepared data is memory-mapped, so size does not matter"),
    )
    # Preferences and rewards
    rl_beta: float | None = handed(
        None, "how far from the reference: dpo, ipo, kto, orpo, simpo, grpo", to="beta", own=PREFERENCES
    )
    dpo_beta: float | None = handed(None, "an older name of rl_beta", to="beta", own=PREFERENCES)
    dpo_loss_type: str | list[str] | None = handed(
        None,
        "rl: dpo: a loss of DPOTrainer, or several, summed",
        to="loss_type",
        value=convert.to_list,
        methods="dpo ipo",
        own=PREFERENCES,
    )
    dpo_loss_weights: list[float] | None = handed(
        None, "rl: dpo: their weights", to="loss_weights", methods="dpo", own=PREFERENCES
    )
    dpo_label_smoothing: float | None = handed(
        None,
        "rl: dpo: share of the pairs that may be the wrong way round; robust, exo_pair, aot, aot_unpaired",
        to="label_smoothing",
        methods="dpo",
        own=PREFERENCES,
    )
    dpo_use_weighting: bool | None = handed(
        None,
        "rl: dpo, ipo: WPO, pairs weighted by how likely they are",
        to="use_weighting",
        methods="dpo ipo",
        own=PREFERENCES,
    )
    precompute_ref_log_probs: bool | None = handed(
        None, "the reference runs once, before training", SPEED, own=PREFERENCES
    )
    orpo_alpha: float | None = handed(
        None, "rl: orpo: weight of the odds ratio", to="beta", methods="orpo", own=PREFERENCES
    )
    kto_desirable_weight: float | None = handed(
        None, "rl: kto: weight of good answers", to="desirable_weight", methods="kto", own=PREFERENCES
    )
    kto_undesirable_weight: float | None = handed(
        None, "rl: kto: weight of bad ones", to="undesirable_weight", methods="kto", own=PREFERENCES
    )
    simpo_gamma: float | None = handed(
        None, "rl: simpo: margin between the two rewards", methods="simpo", own=PREFERENCES
    )
    cpo_alpha: float | None = handed(
        None,
        "rl: simpo: weight of the loss on the better answer; TRL's default is 1, SimPO alone wants 0",
        methods="simpo",
        own=PREFERENCES,
    )
    num_labels: int | None = both(None, "reward_model: 1", own=REWARDS)
    center_rewards_coefficient: float | None = handed(
        None, "reward_model: keeps rewards around 0", own=REWARDS
    )
    trl: dict[str, Any] = both(
        {},
        "fields of the trainer's config by TRL's names; `reward_funcs`: dotted names of functions",
        own=PREFERENCES,
    )
    # Training
    neftune_noise_alpha: float | None = handed(
        None, "noise on the embeddings", own=with_trl("write lora_dropout")
    )
    noisy_embedding_alpha: float | None = handed(
        None,
        "an older name of neftune_noise_alpha",
        to="neftune_noise_alpha",
        own=with_trl("write lora_dropout"),
    )
    loraplus_lr_ratio: float | None = both(
        None,
        "LoRA+: the rate of B is so many times learning_rate",
        own=with_trl("write learning_rate, which holds for all"),
    )
    loraplus_lr_embedding: float | None = both(
        None,
        "LoRA+: the rate of LoRA on embeddings; 1e-6",
        own=with_trl("write learning_rate, which holds for all"),
    )
    lr_scheduler_kwargs: dict[str, Any] | None = handed(
        None, "arguments of the scheduler", own=with_trl("write cosine_min_lr_ratio")
    )
    optim_target_modules: str | list[str] | None = handed(
        None, "layers of GaLore, APOLLO and similar", own=with_trl("leave it out: AdamW has none")
    )
    auto_find_batch_size: bool | None = handed(
        None, "halves micro_batch_size until a step fits", own=with_trl("write micro_batch_size")
    )
    pad_to_multiple_of: int | None = handed(
        None,
        "length of a batch; pad_to_sequence_len: sequence_len",
        own=with_trl("write pad_to_sequence_len: true"),
    )
    group_by_length: bool | None = handed(
        None,
        "rows of one length in a batch",
        to="train_sampling_strategy",
        value=convert.to_sampling,
        own=ignored("packing leaves no padding to save"),
    )
    gradient_checkpointing_kwargs: dict[str, Any] | None = handed(
        None,
        "use_reentrant is false by default",
        value=convert.to_non_reentrant,
        own=ignored("checkpointing is always non-reentrant: the other kind breaks the graph"),
    )
    torch_compile_backend: str | None = handed(
        None,
        "inductor, aot_eager, eager ...",
        SPEED,
        own=ignored("the backend is Inductor with `torch_compile: true`, else none is needed"),
    )
    dataloader_num_workers: int | None = handed(None, "processes that make batches", SPEED, own=BATCHES)
    dataloader_pin_memory: bool | None = handed(
        None, "for devices with memory of their own", SPEED, own=ignored("there is one device")
    )
    dataloader_prefetch_factor: int | None = handed(
        None, "batches that each of them makes ahead", SPEED, own=BATCHES
    )
    dataloader_drop_last: bool | None = handed(
        None,
        "leaves out a last batch that is smaller",
        own=ignored("the last batch of an epoch is trained on"),
    )
    # Output
    save_only_model: bool | None = handed(
        None,
        "checkpoints that cannot be resumed",
        SPEED,
        own=ignored("moments are small and needed to resume"),
    )
    metric_for_best_model: str | None = handed(
        None,
        "what load_best_model_at_end goes by; eval_loss",
        SPEED,
        own=with_trl("the best checkpoint has the least loss on the evaluation set"),
    )
    greater_is_better: bool | None = handed(
        None, "whether more of it is better", SPEED, own=ignored("the best checkpoint has the least loss")
    )
    hub_model_id: str | None = handed(
        None, "the adapter is uploaded under this name, privately", SPEED, own=UPLOAD
    )
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] | None = handed(
        None, "when", SPEED, own=ignored("nothing is uploaded")
    )
    hub_revision: str | None = handed(None, "branch that it is uploaded to", SPEED, own=UPLOAD)
    include_tokens_per_second: bool | None = handed(
        None,
        "counts tokens: `num_input_tokens_seen`",
        SPEED,
        to="include_num_input_tokens_seen",
        own=ignored("always shown"),
    )
    use_mlflow: bool = both(False, "report_to: mlflow", SPEED, own=TRACKER)
    use_comet: bool = both(False, "report_to: comet_ml", SPEED, own=TRACKER)
    use_trackio: bool = both(False, "report_to: trackio", SPEED, own=TRACKER)
    mlflow_run_name: str | None = handed(None, "name of the run", SPEED, to="run_name", own=TRACKER)
    trackio_run_name: str | None = handed(None, "name of the run", SPEED, to="run_name", own=TRACKER)
    trackio_project_name: str | None = handed(None, "project", SPEED, to="project", own=TRACKER)
    trackio_space_id: str | None = handed(None, "the Space that shows it", SPEED, own=TRACKER)
    callbacks: list[str] | None = both(
        None,
        "dotted names of transformers' TrainerCallback classes; ours",
        SPEED,
        own=with_trl("leave it out: the loop is Monograph's own"),
    )

    @property
    def rows(self) -> Rows:
        return self.method.rows

    @property
    def method_name(self) -> str:
        return method_of(self.rl, self.reward_model)

    @property
    def method(self) -> Method:
        return METHODS[self.method_name]

    def trackers(self) -> list[str]:
        more = {"mlflow": self.use_mlflow, "comet_ml": self.use_comet, "trackio": self.use_trackio}
        return list(dict.fromkeys([*super().trackers(), *(name for name, asked in more.items() if asked)]))


TRL_KEYS = {name: row for name, row in rows_of(TrlRecipe).items() if name not in KEYS}
