"""The keys of a recipe: names, types, defaults and meaning. axolotl's names, so that its files can be used.

A field is a key; its annotation is the type that is checked, `about` the line in docs/recipe.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal


def key(default: Any, about: str) -> Any:
    """A key with its default (a list or dict stands for a fresh copy of it) and what it does."""
    metadata = {"about": about}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DatasetKeys:
    """One entry of `datasets` or `test_datasets`."""

    path: str = key(
        "",
        "a .jsonl, .json or .parquet file, a folder of them, a name on the Hub, or a format: see data_files",
    )
    type: str | dict[str, str] = key("", "completion, alpaca, instruction, chat_template, input_output")
    data_files: str | list[str] | None = key(
        None, "files inside the folder or dataset `path`; beside `path: json` (parquet, csv, text) themselves"
    )
    ds_type: str | None = key(
        None, "json, parquet, csv, text or arrow, where the file's ending does not say it"
    )
    name: str | None = key(None, "configuration of a dataset on the Hub")
    split: str | None = key(
        None, "split to take, `train[:10%]` too; train by default, which a single file is"
    )
    revision: str | None = key(None, "commit or tag of a dataset on the Hub")
    field: str | None = key(None, "completion: the column with the text; `text` by default")
    field_messages: str | None = key(None, "chat_template: the column with the messages; `messages`")
    message_field_role: str | None = key(None, "chat_template: the name of the role; `role`")
    message_field_content: str | None = key(None, "chat_template: the name of the content; `content`")
    message_property_mappings: dict[str, str] = key(
        {}, "chat_template: the template's names of keys to yours"
    )
    field_tools: str | None = key(None, "chat_template: the column with the tools of a chat; `tools`")
    field_thinking: str | None = key(None, "chat_template: the reasoning of a message; `reasoning_content`")
    template_thinking_key: str | None = key(None, "chat_template: its name in the template; the same")
    split_thinking: bool = key(False, "chat_template: `<think>...</think>` in a content becomes reasoning")
    message_field_training: str | None = key(None, "chat_template: a boolean per message: is it a target?")
    roles: dict[str, list[str]] | None = key(None, "chat_template: other names of the roles")
    roles_to_train: list[str] | None = key(
        None, "chat_template: whose messages are targets; [assistant]; `[]`: those flagged true alone"
    )
    train_on_eos: Literal["all", "turn", "last", "none"] | None = key(
        None, "chat_template: whether the end of a turn is a target; `turn`: of the turns trained on"
    )
    drop_system_message: bool = key(False, "chat_template: leaves a first system message out")
    chat_template: str | None = key(None, "as the key of the recipe, for this dataset")
    shards: int | None = key(None, "cuts the dataset into so many parts")
    shards_idx: int | None = key(None, "and takes this one, 0 by default")


@dataclass
class Recipe:
    """All keys that are honoured, with the values of one run."""

    # Who trains what
    trainer: Literal["monograph", "trl"] | None = key(
        None,
        "monograph by default, or trl: a trainer of TRL; `rl` and `reward_model` choose it; ours",
    )
    rl: Literal["dpo", "ipo", "kto", "orpo", "simpo", "grpo", "gdpo"] | None = key(
        None, "tuning by preferences or rewards, by TRL"
    )
    reward_model: bool = key(False, "trains a model that gives a reward, by TRL")
    # The model
    base_model: str = key("", "folder of the model, or its name on the Hub")
    revision_of_model: str | None = key(None, "commit or tag on the Hub")
    tokenizer_config: str | None = key(None, "folder of the tokenizer; that of the model by default")
    load_in_4bit: bool | None = key(None, "quantises the base to 4 bits; true with `adapter: qlora`")
    bnb_config_kwargs: dict[str, Any] = key({}, "bnb_4bit_quant_type, bnb_4bit_use_double_quant")
    bf16: bool | Literal["auto", "full"] = key(
        "auto", "bfloat16 activations and adapter inputs; false: float32"
    )
    fp16: bool = key(False, "float16 instead of bfloat16, with the loss scaled as torch's GradScaler does")
    attn_implementation: str = key("monograph", "flash, flex and xformers names mean monograph; sdpa, eager")
    device: str | int | None = key(
        None, "where the run computes: cpu, cuda, cuda:0, auto (an accelerator if there is one); see below"
    )
    device_map: str | int | dict[str, str | int] | None = key(
        None, "the same as axolotl writes it; a mapping may name one device"
    )
    base_memory: int | str | None = key(
        None, "how much of the mapped base may be in memory, e.g. 3GiB; all of it by default"
    )
    output_router_logits: bool | None = key(
        None, "adds the loss of a mixture's routers; as config.json of the model by default"
    )
    router_aux_loss_coef: float | None = key(None, "its weight; that of config.json by default")
    # LoRA
    adapter: Literal["qlora", "lora"] | None = key(None, "qlora or lora")
    lora_model_dir: str | None = key(None, "an adapter to start from, or to generate with")
    another_base: bool = key(
        False, "that adapter may be of another base than monograph.json beside it says; ours"
    )
    lora_r: int = key(16, "rank")
    lora_alpha: int | float = key(32, "scale: alpha / r")
    lora_dropout: float = key(0.0, "dropout in front of A")
    lora_target_linear: bool = key(
        False,
        "all linear layers but the head and the router; in PEFT that has experts too on most models",
    )
    lora_target_modules: str | list[str] | None = key(
        None, "names of layers, or one regular expression; beside lora_target_linear: names of more layers"
    )
    lora_target_parameters: str | list[str] | None = key(
        None, "names of experts' weights: `mlp.experts.gate_up_proj`, `mlp.experts.down_proj`"
    )
    lora_modules_to_save: list[str] | None = key(None, "layers trained whole and saved with the adapter")
    peft_trainable_token_indices: list[int] | dict[str, list[int]] | None = key(
        None,
        "rows of the embedding to train, or `{embed_tokens: [...], lm_head: [...]}`; a tied head has them",
    )
    peft_ensure_weight_tying: bool = key(
        False, "tied embedding and head stay one tensor in lora_modules_to_save"
    )
    lora_rank_pattern: dict[str, int] = key({}, "rank by name of the layer")
    lora_alpha_pattern: dict[str, int | float] = key({}, "alpha by name of the layer")
    peft_use_rslora: bool = key(False, "scale alpha / sqrt(r)")
    peft_use_dora: bool = key(False, "DoRA: magnitudes are trained too")
    peft_layers_to_transform: list[int] | None = key(None, "only these decoder layers")
    peft_layers_pattern: str | list[str] | None = key(None, "the name of the list of layers")
    peft_init_lora_weights: bool | str = key(
        True, "where the adapter starts: false, gaussian, orthogonal, mica, pissa, pissa_niter_N, loftq"
    )
    peft: dict[str, Any] = key({}, "`loftq_config: {loftq_bits: 4, loftq_iter: 1}` starts with LoftQ")
    # Data
    datasets: list[DatasetKeys] = key([], "what to train on")
    test_datasets: list[DatasetKeys] = key([], "what to evaluate on, instead of val_set_size")
    val_set_size: int | float = key(0, "documents, or a share below 1, held back for evaluation")
    dataset_prepared_path: str | None = key(None, "where tokens are kept; last_run_prepared by default")
    dataset_processes: int | None = key(None, "processes that tokenise; dataset_num_proc is the same")
    shuffle_merged_datasets: bool = key(True, "false keeps the order of the files within a row")
    sequence_len: int = key(2048, "tokens of a row; longer documents: excess_length_strategy")
    excess_length_strategy: Literal["drop", "truncate", "split", "raise"] | None = key(
        None,
        "for documents too long: drop; completion: split into rows, as axolotl; written, it holds for all",
    )
    min_sample_len: int | None = key(None, "shorter documents are left out")
    sample_packing: bool = key(False, "several documents in a row")
    eval_sample_packing: bool | None = key(None, "the same in evaluation; as sample_packing by default")
    pad_to_sequence_len: bool | None = key(None, "every batch has sequence_len tokens; true when packing")
    train_on_inputs: bool = key(False, "prompts are targets too")
    chat_template: str | None = key(None, "tokenizer_default, chatml, or jinja with chat_template_jinja")
    chat_template_jinja: str | None = key(None, "the template itself, or a file")
    chat_template_kwargs: dict[str, Any] = key({}, "handed to the template")
    default_system_message: str | None = key(None, "put in front of chats that have none")
    eot_tokens: list[str] | None = key(None, "tokens that end a turn, besides eos")
    special_tokens: dict[str, Any] = key(
        {},
        "pad_token, eos_token, bos_token, unk_token, additional_special_tokens: a list; new ones: see below",
    )
    tokens: list[str] | None = key(None, "tokens that are added to the vocabulary: see below")
    # Training
    output_dir: str = key("outputs/out", "adapter, checkpoints, metrics and plot")
    seed: int = key(42, "order of the data, dropout, start of the adapter")
    micro_batch_size: int = key(1, "rows of a forward pass")
    gradient_accumulation_steps: int = key(1, "forward passes of a step, over all ranks together")
    virtual_shards: int | None = key(
        None, "leaves of the tree that gradients are summed in; gradient_accumulation_steps; ours"
    )
    ddp_timeout: int = key(1800, "seconds after which a rank that is waited for is named and the run ends")
    eval_batch_size: int | None = key(None, "rows of a forward pass in evaluation; micro_batch_size")
    num_epochs: int | float = key(1, "times through the data; 0.5 is half")
    max_steps: int | None = key(None, "ends earlier")
    optimizer: str = key("adamw_torch", "AdamW with 32-bit moments, inside the graph")
    learning_rate: float = key(2e-4, "at its peak")
    lr_scheduler: Literal[
        "cosine",
        "linear",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "rex",
        "wsd",
        "warmup_stable_decay",
    ] = key("cosine", "decay; wsd, warmup_stable_decay: in the last tenth of the steps")
    cosine_min_lr_ratio: float | None = key(None, "cosine and rex end at this share of the peak")
    warmup_ratio: float | None = key(None, "share of the steps with a rising rate")
    warmup_steps: int | float | None = key(None, "the same in steps; below 1 a share, as in transformers 5")
    weight_decay: float = key(0.0, "AdamW's")
    adam_beta1: float = key(0.9, "AdamW's")
    adam_beta2: float = key(0.999, "AdamW's")
    adam_epsilon: float = key(1e-8, "AdamW's")
    optim_args: str | dict[str, Any] | None = key(
        None, "betas and eps of AdamW: `{betas: [0.9, 0.95]}` or `eps=1e-10`; with trainer: trl any"
    )
    max_grad_norm: float = key(1.0, "gradients are clipped to this norm")
    gradient_checkpointing: bool | Literal["offload", "offload_disk", "unsloth"] = key(
        False, "recomputes each block in the backward pass; offload_disk: its input waits in a file"
    )
    offload_folder: str | None = key(None, "of that file, on a disk; output_dir if missing; ours")
    torch_compile: bool | Literal["auto"] | None = key(
        None, "true: Inductor's code; false: nothing is compiled; auto or missing: as `step_mode` says"
    )
    torch_compile_mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = key(None, "the Inductor options that torch.compile means by this mode; see below")
    torch_compile_options: dict[str, bool | int | float | str] | None = key(
        None, "ten Inductor options; see below"
    )
    step_mode: (
        Literal["graph", "whole_step", "inductor", "inductor_whole_step", "per_layer", "eager"] | None
    ) = key(None, "what is compiled, see training.md; `graph`, or `inductor` with torch_compile: true; ours")
    # Several processes
    shard_size: int | None = key(
        None, "ranks that share one copy of the base, cut among them; 1: each maps the whole; see below; ours"
    )
    replicate_size: int | None = key(
        None, "copies of it: shard_size * replicate_size processes; what they leave by default; ours"
    )
    fsdp_version: int | None = key(None, "1 or 2: the base is sharded alike")
    fsdp_config: dict[str, Any] = key(
        {}, "shards the base over all ranks, as shard_size does; what it cannot mean here is refused"
    )
    fsdp: bool | str | list[str] | None = key(None, "full_shard, auto_wrap: the same under its older name")
    # Output
    logging_steps: int = key(1, "every so many steps a line in metrics.jsonl")
    eval_strategy: Literal["no", "steps", "epoch"] | None = key(
        None, "epoch: evals_per_epoch 1; steps wants eval_steps or evals_per_epoch; no: none"
    )
    evals_per_epoch: int | None = key(None, "evaluations")
    eval_steps: int | float | None = key(None, "evaluates every so many steps, or share of all")
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = key(
        None, "epoch: saves_per_epoch 1; steps wants save_steps; best: each new best alone; no: none"
    )
    saves_per_epoch: int | None = key(None, "checkpoints; 1 by default")
    save_steps: int | float | None = key(None, "saves every so many steps, or share of all")
    save_total_limit: int | None = key(4, "older checkpoints are deleted; the best one stays")
    save_first_step: bool = key(False, "saves after step 1: does saving work?")
    load_best_model_at_end: bool = key(False, "the adapter written at last is the best one")
    early_stopping_patience: int | None = key(None, "ends after so many evaluations without a new best")
    loss_watchdog_threshold: float | None = key(None, "ends if the loss stays above")
    loss_watchdog_patience: int = key(3, "for so many steps")
    max_bad_steps: int = key(
        3, "a step whose loss or gradient is no number is skipped; so many in a row end the run; ours"
    )
    resume_from_checkpoint: str | bool | None = key(
        None, "a checkpoint, or auto: the last in output_dir, which must have one"
    )
    auto_resume_from_checkpoints: bool = key(False, "as resume_from_checkpoint: auto, if there is one")
    report_to: str | list[str] | None = key(None, "trackers of accelerate: wandb, tensorboard, trackio ...")
    wandb_project: str | None = key(None, "project, and report_to: wandb")
    wandb_name: str | None = key(None, "name of the run")
    wandb_entity: str | None = key(None, "who owns it")
    use_wandb: bool = key(False, "report_to: wandb")
    use_tensorboard: bool = key(False, "report_to: tensorboard")
    merge_lora: bool = key(False, "after training `monograph merge` writes a folder output_dir-merged")
    calibration: bool | int = key(
        False,
        "writes calibration.safetensors for `merge --rounding calibrated` from so many rows; true: 16; ours",
    )
    serve_with: Literal["vllm", "sglang", "llama.cpp"] | None = key(
        None, "after training the form of the adapter that this server applies, beside output_dir; ours"
    )

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
        """The mode of the step that these keys mean together; cross_checks.py refuses what contradicts."""
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


KEYS = {entry.name: entry for entry in fields(Recipe)}
DATASET_KEYS = {entry.name: entry for entry in fields(DatasetKeys)}
