"""The table of keys, first part: what Monograph's own engine honours. axolotl's names: its files can be used.

A row (key_row.py): type, default, what it does, what a resumed run does with another value (compared, if
nothing is said), and the engine: `key`, Monograph's alone; `both`, whoever trains; `handed`, TRL's, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from monograph.recipe.config import trl_arguments as convert
from monograph.recipe.config.activation_keys import ActivationKeys
from monograph.recipe.config.dataset_keys import DatasetKeys
from monograph.recipe.config.key_row import (
    ABOVE_0,
    AS_IS,
    AT_LEAST_1,
    DOCUMENTS,
    READ,
    SHARE,
    STEPS,
    TOLD,
    WRITTEN,
    both,
    free,
    handed,
    key,
    rows_of,
)
from monograph.recipe.config.many_keys import ManyKeys
from monograph.recipe.config.meanings import checkpointing_inside, loftq_base

# Why a resumed run may have another value.
ENGINE = free("a checkpoint of TRL's trainers is another thing")
METHOD = free("a checkpoint of TRL's trainers is another thing", trl=True)
BASE_HASH = free("the hash of the base is compared")
SAME_BITS = free("every place and every division gives the same bits")
STEP_MODE = free("step_mode stands for it")
BY_ADAPTER = free("run_identity.py writes it in another way")
EVALUATION = free("what is evaluated on, and when, changes no step")
WRITING = free("where and when things are written or stopped")

Scheduler = Literal[
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "rex",
    "wsd",
    "warmup_stable_decay",
]


@dataclass
class NativeKeys(ActivationKeys, ManyKeys):
    """The keys of a recipe that Monograph's own engine honours."""

    # Who trains what
    trainer: Literal["monograph", "trl"] | None = both(
        None,
        "monograph by default, or trl: a trainer of TRL; `rl` and `reward_model` choose it; ours",
        ENGINE,
    )
    rl: Literal["dpo", "ipo", "kto", "orpo", "simpo", "grpo", "gdpo"] | None = both(
        None, "tuning by preferences or rewards, by TRL", METHOD
    )
    reward_model: bool = both(False, "trains a model that gives a reward, by TRL", METHOD)
    # The model
    base_model: str = both("", "folder of the model, its Hub name, or a GGUF file", BASE_HASH, path=READ)
    revision_of_model: str | None = both(None, "commit or tag on the Hub", BASE_HASH)
    tokenizer_config: str | None = both(
        None,
        "folder of the tokenizer; that of the model by default",
        free("the tokens themselves are compared"),
        path=READ,
    )
    load_in_4bit: bool | None = both(
        None, "quantises the base to 4 bits; true with `adapter: qlora`", BY_ADAPTER
    )
    load_in_8bit: bool | None = both(
        None,
        "quantises the base to int8, a scale for each row, weights alone; with `adapter: lora`",
        BY_ADAPTER,
    )
    bnb_config_kwargs: dict[str, Any] = both({}, "bnb_4bit_quant_type, bnb_4bit_use_double_quant", BY_ADAPTER)
    bf16: bool | Literal["auto", "full"] = handed(
        "auto", "bfloat16 activations and adapter inputs; false: float32", value=convert.to_bf16
    )
    fp16: bool = handed(False, "float16 instead of bfloat16, with the loss scaled as torch's GradScaler does")
    attn_implementation: str = both(
        "monograph", "flash, flex and xformers names mean monograph; sdpa, eager", TOLD
    )
    device: str | int | None = both(
        None,
        "where the run computes: cpu, cuda, cuda:0, auto (an accelerator if there is one); see below",
        SAME_BITS,
    )
    device_map: str | int | dict[str, str | int] | None = both(
        None, "the same as axolotl writes it; a mapping may name one device", SAME_BITS
    )
    base_memory: int | str | None = key(
        None, "how much of the mapped base may be in memory, e.g. 3GiB; all of it by default", SAME_BITS
    )
    output_router_logits: bool | None = both(
        None, "adds the loss of a mixture's routers; as config.json of the model by default"
    )
    router_aux_loss_coef: float | None = handed(None, "its weight; that of config.json by default")
    # LoRA
    adapter: Literal["qlora", "lora"] | None = both(None, "qlora or lora")
    lora_model_dir: str | None = both(
        None,
        "an adapter to start from, or to generate with",
        free("its adapter is in the checkpoint"),
        path=READ,
    )
    another_base: bool = both(
        False,
        "that adapter may be of another base than monograph.json beside it says; ours",
        BASE_HASH,
        once=True,
    )
    lora_r: int = both(16, "rank", peft="r", limit=AT_LEAST_1)
    lora_alpha: int | float = both(32, "scale: alpha / r", peft="lora_alpha", limit=ABOVE_0)
    lora_dropout: float = both(0.0, "dropout in front of A", peft="lora_dropout", limit=SHARE)
    lora_target_linear: bool = both(
        False,
        "all linear layers but the head and the router; in PEFT that has experts too on most models",
    )
    lora_target_modules: str | list[str] | None = both(
        None,
        "names of layers, or one regular expression; beside lora_target_linear: names of more layers",
        peft="target_modules",
    )
    lora_target_parameters: str | list[str] | None = both(
        None,
        "names of experts' weights: `mlp.experts.gate_up_proj`, `mlp.experts.down_proj`",
        peft="target_parameters",
    )
    lora_modules_to_save: list[str] | None = both(
        None, "layers trained whole and saved with the adapter", peft="modules_to_save"
    )
    peft_trainable_token_indices: list[int] | dict[str, list[int]] | None = key(
        None,
        "rows of the embedding to train, or `{embed_tokens: [...], lm_head: [...]}`; a tied head has them",
        peft="trainable_token_indices",
    )
    peft_ensure_weight_tying: bool = key(
        False, "tied embedding and head stay one tensor in lora_modules_to_save", peft="ensure_weight_tying"
    )
    lora_rank_pattern: dict[str, int] = both({}, "rank by name of the layer", peft="rank_pattern")
    lora_alpha_pattern: dict[str, int | float] = both({}, "alpha by name of the layer", peft="alpha_pattern")
    peft_use_rslora: bool = both(False, "scale alpha / sqrt(r)", peft="use_rslora")
    peft_use_dora: bool = both(False, "DoRA: magnitudes are trained too", peft="use_dora")
    peft_layers_to_transform: list[int] | None = both(
        None, "only these decoder layers", peft="layers_to_transform"
    )
    peft_layers_pattern: str | list[str] | None = both(
        None, "the name of the list of layers", peft="layers_pattern"
    )
    peft_init_lora_weights: bool | str = both(
        True, "where the adapter starts: false, gaussian, orthogonal, mica, pissa, pissa_niter_N, loftq"
    )
    peft: dict[str, Any] = both(
        {}, "`loftq_config: {loftq_bits: 4, loftq_iter: 1}` starts with LoftQ", meaning=loftq_base
    )
    # Data
    datasets: list[DatasetKeys] = both([], "what to train on")
    test_datasets: list[DatasetKeys] = both([], "what to evaluate on, instead of val_set_size", EVALUATION)
    val_set_size: int | float = both(0, "documents, or a share below 1, held back for evaluation")
    dataset_prepared_path: str | None = both(
        None, "where tokens are kept; last_run_prepared by default", WRITING, path=WRITTEN
    )
    dataset_processes: int | None = handed(
        None, "processes that tokenise; dataset_num_proc is the same", WRITING, to="dataset_num_proc"
    )
    shuffle_merged_datasets: bool = handed(
        True,
        "false keeps the order of the files within a row",
        to="train_sampling_strategy",
        value=convert.to_sampling,
    )
    sequence_len: int = handed(
        2048, "tokens of a row; longer documents: excess_length_strategy", to="max_length", limit=AT_LEAST_1
    )
    excess_length_strategy: Literal["drop", "truncate", "split", "raise"] | None = key(
        None,
        "for documents too long: drop; completion: split into rows, as axolotl; written, it holds for all",
        trl=DOCUMENTS,
    )
    min_sample_len: int | None = key(None, "shorter documents are left out", trl=DOCUMENTS)
    sample_packing: bool = handed(False, "several documents in a row", to="packing")
    eval_sample_packing: bool | None = handed(
        None, "the same in evaluation; as sample_packing by default", EVALUATION, to="eval_packing"
    )
    pad_to_sequence_len: bool | None = handed(
        None,
        "every batch has sequence_len tokens; true when packing",
        TOLD,
        to="pad_to_multiple_of",
        value=convert.to_row_length,
    )
    train_on_inputs: bool = key(False, "prompts are targets too", trl=DOCUMENTS)
    chat_template: str | None = both(None, "tokenizer_default, chatml, or jinja with chat_template_jinja")
    chat_template_jinja: str | None = both(None, "the template itself, or a file")
    chat_template_kwargs: dict[str, Any] = both({}, "handed to the template")
    default_system_message: str | None = both(None, "put in front of chats that have none")
    eot_tokens: list[str] | None = both(None, "tokens that end a turn, besides eos")
    special_tokens: dict[str, Any] = both(
        {},
        "pad_token, eos_token, bos_token, unk_token, additional_special_tokens: a list; new ones: "
        "[new tokens](recipe.md#new-tokens)",
    )
    tokens: list[str] | None = key(
        None, "tokens that are added to the vocabulary: [new tokens](recipe.md#new-tokens)"
    )
    # Training
    output_dir: str = handed("outputs/out", "adapter, checkpoints, metrics and plot", WRITING, path=WRITTEN)
    seed: int = handed(42, "order of the data, dropout, start of the adapter")
    micro_batch_size: int = handed(
        1, "rows of a forward pass", to="per_device_train_batch_size", limit=AT_LEAST_1
    )
    gradient_accumulation_steps: int = handed(
        1, "forward passes of a step, over all ranks together", limit=AT_LEAST_1
    )
    virtual_shards: int | None = key(
        None,
        "leaves of the tree that gradients are summed in; gradient_accumulation_steps; ours",
        limit=AT_LEAST_1,
    )
    ddp_timeout: int = key(
        1800,
        "seconds after which a rank that is waited for is named and the run ends",
        SAME_BITS,
        limit=AT_LEAST_1,
    )
    eval_batch_size: int | None = handed(
        None,
        "rows of a forward pass in evaluation; micro_batch_size",
        EVALUATION,
        to="per_device_eval_batch_size",
    )
    num_epochs: int | float = handed(
        1, "times through the data; 0.5 is half", TOLD, to="num_train_epochs", limit=ABOVE_0
    )
    max_steps: int | None = handed(None, "ends earlier; -1: no bound", TOLD, limit=STEPS)
    optimizer: str = handed(
        "adamw_torch",
        "AdamW with 32-bit moments, inside the graph",
        free("all names that are accepted are one AdamW", trl=True),
        to="optim",
        value=convert.to_optimizer,
    )
    learning_rate: float = handed(2e-4, "at its peak", TOLD, limit=ABOVE_0)
    lr_scheduler: Scheduler = handed(
        "cosine",
        "decay; wsd, warmup_stable_decay: in the last tenth of the steps",
        TOLD,
        to="lr_scheduler_type",
        value=convert.to_scheduler,
    )
    cosine_min_lr_ratio: float | None = handed(
        None,
        "cosine and rex end at this share of the peak",
        TOLD,
        to="lr_scheduler_kwargs",
        value=convert.to_scheduler_arguments,
        limit=SHARE,
    )
    warmup_ratio: float | None = handed(
        None, "share of the steps with a rising rate", TOLD, to="warmup_steps", limit=SHARE
    )
    warmup_steps: int | float | None = handed(
        None, "the same in steps; below 1 a share, as in transformers 5", TOLD
    )
    weight_decay: float = handed(0.0, "AdamW's")
    adam_beta1: float = handed(0.9, "AdamW's", limit=SHARE)
    adam_beta2: float = handed(0.999, "AdamW's", limit=SHARE)
    adam_epsilon: float = handed(1e-8, "AdamW's")
    optim_args: str | dict[str, Any] | None = handed(
        None,
        "betas and eps of AdamW: `{betas: [0.9, 0.95]}` or `eps=1e-10`; with trainer: trl any",
        value=convert.to_arguments,
    )
    max_grad_norm: float = handed(1.0, "gradients are clipped to this norm")
    gradient_checkpointing: bool | Literal["offload", "offload_disk", "unsloth"] = handed(
        False,
        "recomputes each block in the backward pass; offload_disk: its input waits in a file",
        SAME_BITS,
        value=convert.to_checkpointing,
    )
    offload_folder: str | None = both(
        None, "of that file, on a disk; output_dir if missing; ours", SAME_BITS, path=AS_IS
    )
    torch_compile: bool | Literal["auto"] | None = handed(
        None,
        "true: Inductor's code; false: nothing is compiled; auto or missing: as `step_mode` says",
        STEP_MODE,
        value=convert.to_compile,
    )
    torch_compile_mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = handed(None, "the Inductor options that torch.compile means by this mode; see below", STEP_MODE)
    torch_compile_options: dict[str, bool | int | float | str] | None = both(
        None, "ten Inductor options; see below", STEP_MODE
    )
    step_mode: (
        Literal["graph", "whole_step", "inductor", "inductor_whole_step", "per_layer", "eager"] | None
    ) = both(
        None, "what is compiled, see training.md; `graph`, or `inductor` with torch_compile: true; ours", TOLD
    )
    providers: dict[str, str] | None = both(None, "who computes, see gpu.md: `{rms_norm: portable}`; ours")
    # Several processes
    shard_size: int | None = key(
        None,
        "ranks that share one copy of the base, sharded across them; 1: each maps the whole; see below; ours",
        SAME_BITS,
        limit=AT_LEAST_1,
    )
    replicate_size: int | None = key(
        None, "copies of it, shard_size * replicate_size processes; ours", SAME_BITS, limit=AT_LEAST_1
    )
    expert_parallel_size: int | None = key(
        None, "ranks that own the experts together; 1: each has all; see below", SAME_BITS, limit=AT_LEAST_1
    )
    fsdp_version: int | None = key(None, "1 or 2: the base is sharded alike", SAME_BITS)
    fsdp_config: dict[str, Any] = key(
        {},
        "shards the base over all ranks, as shard_size does; what it cannot mean here is refused",
        SAME_BITS,
        meaning=checkpointing_inside,
    )
    fsdp: bool | str | list[str] | None = key(
        None, "full_shard, auto_wrap: the same under its older name", SAME_BITS
    )
    # Output
    logging_steps: int = handed(1, "every so many steps a line in metrics.jsonl", WRITING, limit=AT_LEAST_1)
    eval_strategy: Literal["no", "steps", "epoch"] | None = handed(
        None, "epoch: evals_per_epoch 1; steps wants eval_steps or evals_per_epoch; no: none"
    )
    evals_per_epoch: int | None = handed(
        None, "evaluations", EVALUATION, to="eval_steps", value=convert.to_share
    )
    eval_steps: int | float | None = handed(None, "evaluates every so many steps, or share", EVALUATION)
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = handed(
        None, "epoch: saves_per_epoch 1; steps wants save_steps; best: each new best alone; no: none"
    )
    saves_per_epoch: int | None = handed(
        None, "checkpoints; 1 by default", WRITING, to="save_steps", value=convert.to_share
    )
    save_steps: int | float | None = handed(None, "saves every so many steps, or share of all", WRITING)
    save_total_limit: int | None = handed(4, "older checkpoints are deleted; the best one stays", WRITING)
    save_first_step: bool = key(False, "saves after step 1: does saving work?", WRITING)
    load_best_model_at_end: bool = handed(False, "the adapter written at last is the best one", WRITING)
    early_stopping_patience: int | None = both(
        None, "ends after so many evaluations without a new best", WRITING
    )
    loss_watchdog_threshold: float | None = both(None, "ends if the loss stays above", WRITING)
    loss_watchdog_patience: int = both(3, "for so many steps", WRITING)
    max_bad_steps: int = key(
        3,
        "a step whose loss or gradient is not finite is skipped; so many in a row end the run; ours",
        WRITING,
        limit=AT_LEAST_1,
    )
    resume_from_checkpoint: str | bool | None = both(
        None,
        "a checkpoint, or auto: the last in output_dir, which must have one",
        WRITING,
        once=True,
        path=AS_IS,
    )
    auto_resume_from_checkpoints: bool = both(
        False, "as resume_from_checkpoint: auto, if there is one", WRITING, once=True
    )
    report_to: str | list[str] | None = handed(
        None, "trackers of accelerate: wandb, tensorboard, trackio ...", WRITING, value=convert.to_trackers
    )
    wandb_project: str | None = both(None, "project, and report_to: wandb", WRITING)
    wandb_name: str | None = handed(None, "name of the run", WRITING, to="run_name")
    wandb_entity: str | None = both(None, "who owns it", WRITING)
    use_wandb: bool = both(False, "report_to: wandb", WRITING)
    use_tensorboard: bool = both(False, "report_to: tensorboard", WRITING)
    merge_lora: bool = both(
        False, "after training `monograph merge` writes a folder output_dir-merged", WRITING
    )
    calibration: bool | int = key(
        False,
        "writes calibration.safetensors for `merge --rounding calibrated` from so many rows; true: 16; ours",
        WRITING,
    )
    serve_with: Literal["vllm", "sglang", "llama.cpp"] | None = both(
        None,
        "after training the form of the adapter that this server applies, beside output_dir; ours",
        WRITING,
    )


KEYS = rows_of(NativeKeys)
