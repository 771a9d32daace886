"""Keys of other recipes that are refused, each with what to do instead.

A key with an empty value (null, false, 0, "", [], {}) asks for nothing and is passed over.

What TRL can do, Monograph's layers do under TRL: such a refusal names TRL's setting.
"""

from __future__ import annotations


def _through_trl(instead: str, setting: str) -> str:
    """A refusal with two ways: another key here, or TRL's own setting over our layers."""
    lead = f"{instead}; or " if instead else ""
    return f"{lead}use TRL: {setting}, with mg.optimize(trainer.model) as in the README"


_PARALLEL = "ranks share the data, and with shard_size the base; leave it out"
_LAUNCH = "start the processes with torchrun; leave it out"
_DPO = f"only supervised tuning is a recipe; {_through_trl('', 'DPOTrainer, GRPOTrainer and kin')}"
_MOE = "experts run in Monograph's own operator; leave it out"
_IMAGES = "only text is trained on; use the text model"
_LENGTHS = "write it into the data, or leave it out"
_RATES = _through_trl("write learning_rate, which holds for all", "SFTTrainer(optimizers=...)")
_QAT = "the base stays as it is quantised; write adapter: qlora"
_ADAPTER = "the base is frozen; write adapter: qlora"
_SAMPLE = "`generate` samples: --temperature, --top-p, --top-k"
_LOSS = "the loss is cross entropy; leave it out"

REFUSED: dict[str, str] = {
    "load_in_8bit": "write load_in_4bit: true",
    "gptq": "use a base in 16 bits or in bitsandbytes' 4 bits",
    "model_quantization_config": "the folder says how it is quantised; `monograph inspect` shows it",
    "model_quantization_config_kwargs": "the folder says how it is quantised; `monograph inspect` shows it",
    "float16": "write fp16: true, which also scales the loss",
    "float32": "write bf16: false",
    "torch_dtype": "write bf16: true, fp16: true, or bf16: false for float32",
    "fp8": "write bf16: true",
    "fp8_config": "write bf16: true",
    "fp8_enable_fsdp_float8_all_gather": _PARALLEL,
    "qat": _QAT,
    "quantization": "`monograph quantize` writes a quantised folder",
    "nvfp4_merge_aware": "merge with `monograph merge`; its report says how much is kept",
    "dsv4_fp4_grouped_mode": _MOE,
    "use_dsv4_kernels": _MOE,
    "use_glm_dsa_kernels": _MOE,
    "use_onebitllms": "use a base in 16 bits or in bitsandbytes' 4 bits",
    "llama4_linearized_experts": "Llama 4's experts are of a kind that is not known; use another model",
    "expert_parallel_size": _PARALLEL,
    "expert_parallel_num_nvl_bytes": _PARALLEL,
    "expert_parallel_token_capacity": _PARALLEL,
    "lora_fan_in_fan_out": "it is for GPT-2's Conv1D layers, which are not quantised",
    "loraplus_lr_ratio": _RATES,
    "loraplus_lr_embedding": _RATES,
    "loftq_config": "write it below `peft:`",
    "relora": "write more steps, or a larger lora_r",
    "relora_steps": "write more steps, or a larger lora_r",
    "relora_warmup_steps": "write more steps, or a larger lora_r",
    "relora_prune_ratio": "write more steps, or a larger lora_r",
    "relora_cpu_offload": "write more steps, or a larger lora_r",
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
    "peft_layer_replication": "leave it out",
    "peft_trainable_token_indices": _through_trl(
        "write lora_modules_to_save: [embed_tokens, lm_head]", "LoraConfig(trainable_token_indices=...)"
    ),
    "unfrozen_parameters": "write lora_modules_to_save, or leave it out: the base is frozen",
    "freeze_mm_modules": _IMAGES,
    "image_size": _IMAGES,
    "trust_remote_code": "code from a model folder is never run; use a model that transformers knows",
    "overrides_of_model_config": "edit config.json of the model's folder",
    "overrides_of_model_kwargs": "edit config.json of the model's folder",
    "rope_scaling": "edit config.json of the model's folder",
    "s2_attention": "write sample_packing: true; attention is exact",
    "tokenizer_use_mistral_common": "use a model folder with tokenizer.json",
    "resize_token_embeddings_to_32x": "the base keeps its vocabulary; leave it out",
    "tokens": "the base keeps its vocabulary; use reserved tokens that it has, through special_tokens",
    "added_tokens_overrides": "the base keeps its vocabulary; use reserved tokens through special_tokens",
    "activation_offloading": "write gradient_checkpointing: true",
    "layer_offloading": "write load_in_4bit: true; offloading is not built yet",
    "ple_cpu_offload": "offloading is not built yet; leave it out",
    "rl": _DPO,
    "trl": _DPO,
    "rl_beta": _DPO,
    "dpo_beta": _DPO,
    "dpo_label_smoothing": _DPO,
    "dpo_loss_type": _DPO,
    "dpo_use_weighting": _DPO,
    "precompute_ref_log_probs": _DPO,
    "rpo_alpha": _DPO,
    "orpo_alpha": _DPO,
    "kto_desirable_weight": _DPO,
    "kto_undesirable_weight": _DPO,
    "simpo_gamma": _DPO,
    "cpo_alpha": _DPO,
    "vllm": _DPO,
    "reward_model": "only causal language models are trained; use TRL's RewardTrainer without Monograph",
    "process_reward_model": "only causal language models are trained; use TRL's PRMTrainer without Monograph",
    "num_labels": "only causal language models are trained; leave it out",
    "center_rewards_coefficient": "only causal language models are trained; leave it out",
    "deepspeed": "write shard_size to cut the base among ranks",
    "context_parallel_size": _PARALLEL,
    "context_parapllel_size": _PARALLEL,
    "sequence_parallel_degree": _PARALLEL,
    "tensor_parallel_size": _PARALLEL,
    "use_ray": _LAUNCH,
    "ray_num_workers": _LAUNCH,
    "pretraining_dataset": "write datasets with type: completion",
    "streaming": "write datasets; prepared data is memory-mapped, so size does not matter",
    "skip_prepare_dataset": "data is always tokenised first; leave it out",
    "push_dataset_to_hub": "copy dataset_prepared_path yourself",
    "hub_model_id": _through_trl("upload output_dir with `hf upload`", "SFTConfig(push_to_hub=True)"),
    "dataset_exact_deduplication": "remove duplicates from the file",
    "curriculum_sampling": "write shuffle_merged_datasets: false",
    "sample_packing_sequentially": "write shuffle_merged_datasets: false",
    "use_pose": _LENGTHS,
    "neftune_noise_alpha": _through_trl("write lora_dropout", "SFTConfig(neftune_noise_alpha=...)"),
    "noisy_embedding_alpha": _through_trl("write lora_dropout", "SFTConfig(neftune_noise_alpha=...)"),
    "auto_find_batch_size": "write micro_batch_size",
    "embedding_lr": _RATES,
    "embedding_lr_scale": _RATES,
    "lr_groups": _RATES,
    "lr_scheduler_kwargs": _through_trl("write cosine_min_lr_ratio", "SFTConfig(lr_scheduler_kwargs=...)"),
    "cosine_constant_lr_ratio": "write cosine_min_lr_ratio",
    "eta_min": "write cosine_min_lr_ratio",
    "lr_quadratic_warmup": "write warmup_ratio, which rises in a line",
    "metric_for_best_model": _through_trl(
        "the best checkpoint has the least loss on the evaluation set", "SFTConfig(metric_for_best_model=...)"
    ),
    "trainer_cls": "the step is Monograph's own; monograph.training.TrainStep is for your own loop",
    "generation_do_sample": _SAMPLE,
    "generation_temperature": _SAMPLE,
    "generation_top_p": _SAMPLE,
    "generation_top_k": _SAMPLE,
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
}
