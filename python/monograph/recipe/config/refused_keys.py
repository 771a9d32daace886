"""Keys of other recipes that are refused, each with what to do instead.

A key with an empty value (null, false, 0, "", [], {}) asks for nothing and is passed over.

What TRL can do, Monograph's layers do under TRL: such a refusal names the other engine, `trainer: trl`, if
the key is one of its keys (trl/keys.py), or TRL's own setting.
"""

from __future__ import annotations

from monograph.recipe.config.plugin_keys import OF_OPTIMIZERS, OF_PLUGINS


def _through_trl(instead: str, setting: str) -> str:
    """A refusal with two ways: another key here, or TRL's own setting over our layers."""
    return f"{instead}; or use TRL: {setting}, with mg.optimize(trainer.model) as in the README"


def _with_trl(instead: str) -> str:
    """A refusal of a key that the other engine has."""
    return f"{instead}; or write trainer: trl beside it"


_PARALLEL = "ranks share the data, and with shard_size the base; leave it out"
_LAUNCH = "start the processes with torchrun; leave it out"
_DPO = "it is for preferences and rewards, which TRL trains; write rl: dpo, ipo, kto, orpo, simpo or grpo"
_REWARD = "it is for reward models, which TRL trains; write reward_model: true"
_MOE = "experts run in Monograph's own operator; leave it out"
_IMAGES = "only text is trained on; use the text model"
_LENGTHS = "write it into the data, or leave it out"
_RATES = _through_trl("write learning_rate, which holds for all", "SFTTrainer(optimizers=...)")
_QAT = "the base stays as it is quantised; write adapter: qlora"
_ADAPTER = "the base is frozen; write adapter: qlora"
_SAMPLE = "`generate` samples: --temperature, --top-p, --top-k"
_LOSS = "the loss is cross entropy; leave it out"
_LAYERS = "adapter: qlora quantises all linear layers alike, or the folder says how each is; leave it out"
_SYNTHETIC = "rows are read and not made up; write the path of a file"
_SHARDS = "write shards and shards_idx in the entries of datasets"
_GONE = "TRL has it no more; leave it out"
_ATTENTION = "attention is the model's own; leave it out"

REFUSED: dict[str, str] = {
    "load_in_8bit": "8-bit integers are not built; write load_in_4bit: true, or leave it out for 16 bits",
    "gptq": "use a base in 16 bits or in bitsandbytes' 4 bits",
    "float16": "write fp16: true, which also scales the loss",
    "float32": "write bf16: false",
    "torch_dtype": "write bf16: true, fp16: true, or bf16: false for float32",
    "fp8": "write bf16: true",
    "fp8_config": "write bf16: true",
    "fp8_enable_fsdp_float8_all_gather": _PARALLEL,
    "qat": _QAT,
    "quantization": "`monograph quantize` writes a quantised folder",
    "nvfp4_merge_aware": "merge with `monograph merge`; its report says how much is kept",
    "nvfp4_merge_aware_start_step": "merge with `monograph merge`; its report says how much is kept",
    "dsv4_fp8_nonexpert_mode": _MOE,
    "dsv4_bf16_all": _MOE,
    "use_onebitllms": "use a base in 16 bits or in bitsandbytes' 4 bits",
    "nonexpert_quantization": _LAYERS,
    "gemma4_fp8_nonexpert": _LAYERS,
    "gemma4_nf4_nonexpert": _LAYERS,
    "llama4_linearized_experts": "Llama 4's experts are of a kind that is not known; use another model",
    "expert_parallel_size": _PARALLEL,
    "expert_parallel_num_nvl_bytes": _PARALLEL,
    "expert_parallel_token_capacity": _PARALLEL,
    "expert_parallel_num_rdma_bytes": _PARALLEL,
    "expert_parallel_backend": _PARALLEL,
    "expert_parallel_fallback_on_unsupported": _PARALLEL,
    "lora_fan_in_fan_out": "it is for GPT-2's Conv1D layers, which are not quantised",
    "loraplus_lr_ratio": _with_trl("write learning_rate, which holds for all"),
    "loraplus_lr_embedding": _with_trl("write learning_rate, which holds for all"),
    "loftq_config": "write it below `peft:`",
    "relora": "write more steps, or a larger lora_r",
    "relora_steps": "write more steps, or a larger lora_r",
    "relora_warmup_steps": "write more steps, or a larger lora_r",
    "relora_prune_ratio": "write more steps, or a larger lora_r",
    "relora_cpu_offload": "write more steps, or a larger lora_r",
    "relora_prune_method": "write more steps, or a larger lora_r",
    "jagged_restart_steps": "write lr_scheduler: cosine",
    "jagged_restart_warmup_steps": "write lr_scheduler: cosine",
    "jagged_restart_anneal_steps": "write lr_scheduler: cosine",
    "lisa_n_layers": _ADAPTER,
    "lisa_step_interval": _ADAPTER,
    "lisa_layers_attribute": _ADAPTER,
    "llmcompressor": _ADAPTER,
    "reinit_weights": _ADAPTER,
    "diffusion": _LOSS,
    "ebft": _LOSS,
    "use_eaft": _LOSS,
    "eaft_alpha": _LOSS,
    "eaft_k": _LOSS,
    "liger_use_token_scaling": _LOSS,
    "peft_layer_replication": "leave it out",
    "unfrozen_parameters": _with_trl("write lora_modules_to_save: the base is frozen"),
    "freeze_mm_modules": _IMAGES,
    "image_size": _IMAGES,
    "image_resize_algorithm": _IMAGES,
    "role_boundaries": _IMAGES,
    "processor_kwargs": _IMAGES,
    "overrides_of_model_config": "edit config.json of the model's folder",
    "overrides_of_model_kwargs": "edit config.json of the model's folder",
    "model_kwargs": "edit config.json of the model's folder",
    "rope_scaling": "edit config.json of the model's folder",
    "s2_attention": "write sample_packing: true; attention is exact",
    "scaling_softmax": _ATTENTION,
    "scaling_softmax_factor": _ATTENTION,
    "scaling_softmax_bias": _ATTENTION,
    "shrink_embeddings": "rows that no token has cost nothing in training; leave it out",
    "fix_untrained_tokens": "new rows begin as the mean of the others; write peft_trainable_token_indices",
    "added_tokens_overrides": "write tokens: [...], or name reserved tokens in special_tokens",
    "selective_checkpointing": "write gradient_checkpointing: true, which keeps inputs of blocks alone",
    "layer_offloading": "write base_memory: 3GiB, which keeps a quantised base in its files; or leave it out",
    "ple_cpu_offload": "write base_memory: 3GiB, which keeps a quantised base in its files; or leave it out",
    "trl": _DPO,
    "rl_beta": _DPO,
    "dpo_beta": _DPO,
    "dpo_label_smoothing": _DPO,
    "dpo_loss_type": _DPO,
    "dpo_use_weighting": _DPO,
    "precompute_ref_log_probs": _DPO,
    "rpo_alpha": "write rl: dpo, dpo_loss_type: [sigmoid, sft] and dpo_loss_weights",
    "orpo_alpha": _DPO,
    "kto_desirable_weight": _DPO,
    "kto_undesirable_weight": _DPO,
    "simpo_gamma": _DPO,
    "cpo_alpha": _DPO,
    "dpo_loss_weights": _DPO,
    "dpo_padding_free": "TRL 1.16 has it switched off; leave it out",
    "dpo_use_liger_kernel": "the head is Monograph's own; leave it out",
    "dpo_generate_during_eval": _GONE,
    "dpo_norm_loss": _GONE,
    "dpo_use_logits_to_keep": _GONE,
    "vllm": "completions are generated by the trained model itself; leave it out",
    "process_reward_model": "TRL 1.16 has no trainer of rewards for steps; leave it out",
    "num_labels": _REWARD,
    "center_rewards_coefficient": _REWARD,
    "max_prompt_len": "write sequence_len: longer prompts are left out, longer pairs cut",
    "deepcompile": "it is for deepspeed; write torch_compile: true",
    "context_parallel_size": _PARALLEL,
    "context_parapllel_size": _PARALLEL,
    "sequence_parallel_degree": _PARALLEL,
    "tensor_parallel_size": _PARALLEL,
    "ring_attn_func": _PARALLEL,
    "heads_k_stride": _PARALLEL,
    "use_ray": _LAUNCH,
    "ray_num_workers": _LAUNCH,
    "ray_run_name": _LAUNCH,
    "resources_per_worker": _LAUNCH,
    "pretraining_dataset": (
        "write datasets with type: completion, and streaming: true beside trainer: trl if they are too large"
    ),
    "streaming": _with_trl("leave it out: prepared data is memory-mapped, so size does not matter"),
    "pretraining_sample_concatenation": "write sample_packing: true, which keeps documents apart",
    "skip_prepare_dataset": "it is for images and sound, and only text is trained on; leave it out for text",
    "dataset_shard_num": _SHARDS,
    "dataset_shard_idx": _SHARDS,
    "push_dataset_to_hub": "copy dataset_prepared_path yourself",
    "hub_model_id": _with_trl("upload output_dir with `hf upload`"),
    "hub_revision": _with_trl("upload output_dir with `hf upload`"),
    "dataset_exact_deduplication": "remove duplicates from the file",
    "curriculum_sampling": "write shuffle_merged_datasets: false",
    "sample_packing_sequentially": "write shuffle_merged_datasets: false",
    "use_pose": _LENGTHS,
    "pose_max_context_len": _LENGTHS,
    "pose_num_chunks": _LENGTHS,
    "pose_split_on_token_ids": _LENGTHS,
    "neftune_noise_alpha": _with_trl("write lora_dropout"),
    "noisy_embedding_alpha": _with_trl("write lora_dropout"),
    "auto_find_batch_size": _with_trl("write micro_batch_size"),
    "pad_to_multiple_of": _with_trl("write pad_to_sequence_len: true"),
    "optim_target_modules": _with_trl("leave it out: AdamW has none"),
    "embedding_lr": _RATES,
    "embedding_lr_scale": _RATES,
    "lr_groups": _RATES,
    "lr_scheduler_kwargs": _with_trl("write cosine_min_lr_ratio"),
    "cosine_constant_lr_ratio": "write cosine_min_lr_ratio",
    "eta_min": "write cosine_min_lr_ratio",
    "lr_quadratic_warmup": "write warmup_ratio, which rises in a line",
    "metric_for_best_model": _with_trl("the best checkpoint has the least loss on the evaluation set"),
    "callbacks": _with_trl("leave it out: the loop is Monograph's own"),
    "trainer_cls": "the step is Monograph's own; monograph.training.TrainStep is for your own loop",
    "generation_do_sample": _SAMPLE,
    "generation_temperature": _SAMPLE,
    "generation_top_p": _SAMPLE,
    "generation_top_k": _SAMPLE,
    **OF_PLUGINS,
    **OF_OPTIMIZERS,
}

# The same inside an entry of `datasets`.
DATASET_REFUSED: dict[str, str] = {
    "field_chosen": _DPO,
    "field_rejected": _DPO,
    "step_separator": _DPO,
    "train_on_last_step_only": _DPO,
    "max_completion_length": "write sequence_len",
    "trust_remote_code": "code from a dataset is never run; use JSONL or Parquet files",
    "conversation": "write type: chat_template",
    "message_field_training_detail": "write message_field_training",
    "input_transform": "transform the file",
    "preprocess_shards": "write shards",
    "temperature": "leave it out: it is for distillation",
    "logprobs_field": "leave it out: it is for distillation",
    "chat_template_jinja": "write chat_template_jinja for the recipe, and chat_template: jinja here",
    "field_human": "write type: chat_template with field_messages and roles",
    "field_model": "write type: chat_template with field_messages and roles",
    "input_format": "write a mapping as type, with format",
    "train_on_eot": "write train_on_eos, which holds for eot_tokens too",
    "length": _SYNTHETIC,
    "sequence_length": _SYNTHETIC,
    "min_input_id": _SYNTHETIC,
    "max_input_id": _SYNTHETIC,
    "seed": _SYNTHETIC,
    "skip": "leave the rows out of the file",
    "text_column": "write field",
}

# The same inside a mapping as `type` of a dataset.
TYPE_REFUSED: dict[str, str] = {
    "field_system": "write system_prompt, one for all rows, or type: chat_template",
    "system_format": "write the whole text as system_prompt",
}
