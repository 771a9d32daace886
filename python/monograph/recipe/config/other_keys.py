"""The table of keys, last part: keys of other recipes. Each does nothing here and says why, is refused with
what to do instead, or means keys of ours (meanings.py).

A key with an empty value (null, false, 0, "", [], {}) asks for nothing and is passed over. Keys that TRL's
engine honours say in their own rows what Monograph's does with them (keys.py). What TRL can do beyond them,
Monograph's layers do under TRL: such a refusal names TRL's own setting.
"""

from __future__ import annotations

from monograph.recipe.config import meanings
from monograph.recipe.config.key_row import MeaningOf, words

_STREAM = (
    "write datasets with type: completion, and streaming: true beside trainer: trl if they are too large"
)

# Keys that do nothing here, by the reason.
OTHERS_IGNORED: dict[str, str] = words(
    {
        "the class follows from config.json": (
            "model_type is_llama_derived_model is_mistral_derived_model is_falcon_derived_model "
            "is_qwen_derived_model type_of_model cls_model_config"
        ),
        "the class follows from tokenizer_config.json": "tokenizer_type",
        "tokenizers are always the fast ones": "tokenizer_use_fast tokenizer_legacy",
        "only text is trained on": "processor_type",
        "the configuration is read from base_model": "base_model_config",
        "weights are always read shard by shard": "low_cpu_mem_usage",
        "there is one device": "lora_on_cpu experimental_skip_move_to_device max_memory",
        "the LoRA part is always computed inside the operator of its linear layer": (
            "lora_mlp_kernel lora_qkv_kernel lora_o_kernel"
        ),
        "LoRA on embeddings is PEFT's own": "lora_embedding_kernel",
        "it is a mode of NVIDIA GPUs": "tf32",
        "attention is Monograph's own; attn_implementation chooses another": "flash_attention",
        "write attn_implementation: sdpa": "sdp_attention",
        "write attn_implementation: eager": "eager_attention",
        "attention is Monograph's own": (
            "xformers_attention flex_attention flex_attn_compile_kwargs large_head_attention "
            "flash_attn_d512 gemma4_hybrid_attn_impl sage_attention sdpa_varlen"
        ),
        "the loss never makes whole logits": (
            "flash_attn_cross_entropy cut_cross_entropy chunked_cross_entropy "
            "chunked_cross_entropy_num_chunks liger_cross_entropy liger_fused_linear_cross_entropy"
        ),
        "the packer sees all documents": (
            "sample_packing_group_size pretrain_multipack_attn pretrain_multipack_buffer_size "
            "streaming_multipack_buffer_size sample_packing_seq_len_multiplier "
            "sample_packing_mp_start_method"
        ),
        "rows hold as many documents as fit": "sample_packing_bin_size",
        "efficiency is measured": "sample_packing_eff_est",
        "packed rows are flattened into one": "multipack_real_batches batch_flattening",
        "sequence_len is the length of packed rows": "max_packed_sequence_len",
        "micro_batch_size x gradient_accumulation_steps is the batch": "batch_size",
        "only tokens and labels are kept": "remove_unused_columns",
        "prepared data is memory-mapped": "dataset_keep_in_memory",
        "adapters are always safetensors": "save_safetensors",
        "always shown": "include_tkps",
        "Monograph brings its own kernels": (
            "plugins liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_glu_activation "
            "liger_swiglu liger_kernel_impl use_kernels fused_attn_kernel use_scattermoe "
            "experts_implementation flash_optimum flash_attn_fuse_mlp flash_attn_fuse_qkv "
            "flash_attn_rms_norm use_sonicmoe dsv4_fp4_grouped_mode use_dsv4_kernels use_glm_dsa_kernels "
            "expert_backend moe_grouped_backend moe_dequant_chunk_size moe_bnb_fast dsv4_fp8_lora_kernel "
            "dsv4_shared_mlp_lora_kernel"
        ),
        "adapter: qlora quantises experts with the rest": "quantize_moe_experts",
        "gradients are not logged one by one": "wandb_watch",
        "files stay in output_dir": "wandb_log_model",
        "the tracker makes its own": "wandb_run_id",
        "it has no effect on QLoRA": "torchdistx_path",
        "monograph convert reads it from config.json": "gptq_groupsize gptq_model_v1 gptq_disable_exllama",
        "every key is always checked": "strict",
        "the gradient is one tensor, summed over ranks at once": (
            "ddp_find_unused_parameters ddp_bucket_cap_mb"
        ),
        "the base is frozen: nothing of it is sent": "ddp_broadcast_buffers",
        "write report_to, or read metrics.jsonl": "use_otel_metrics otel_metrics_host otel_metrics_port",
        "the Hub library finds its own": "hf_use_auth_token",
        "one step leaves nothing behind to collect": "gc_steps gc_collect_steps",
        "the allocator of a device keeps its cache": "torch_empty_cache_steps",
        "use preprocess --debug": "debug",
        "torchrun says it": "local_rank world_size ddp",
        "of accelerate only its launcher and its trackers are used": "accelerator_config",
        "with shard_size each rank reads its own bytes alone": "qlora_sharded_model_loading",
        "rank 0 writes a whole adapter": "fsdp_final_state_dict_type",
        "memory of a device is not bounded": "gpu_memory_limit",
        "norms compute in float32 whatever their dtype": "fp32_norms fp32_norm_classes",
        "embeddings keep their dtype": "embeddings_skip_upcast",
        "evaluation gives eval_loss; ask the model with `generate`": (
            "eval_table_size eval_table_max_new_tokens eval_max_new_tokens eval_causal_lm_metrics "
            "do_causal_lm_eval generate_samples do_bench_eval bench_dataset bench_split "
            "num_generation_samples generation_max_new_tokens generation_prompt_ratio include_for_metrics"
        ),
        "only safetensors are fetched": "base_model_ignore_patterns",
        "tiled_mlp computes with the MLP of the model": "tiled_mlp_use_original_mlp",
        "tokens are counted when the data are prepared": "total_num_tokens total_supervised_tokens",
        "sequence_len holds for evaluation too": "eval_sequence_len",
        "shuffle_merged_datasets shuffles all rows": "shuffle_before_merging_datasets",
        "the kernels take any number of rows": "resize_token_embeddings_to_32x",
        "new rows begin as the mean of the others": "mean_resizing_embeddings",
        "transformers decides how templates are saved": "tokenizer_save_jinja_files",
        "adapters are float32": "peft_autocast_adapter_dtype",
        "the command says it": "is_preprocess axolotl_config_path",
        "it has no meaning": "test_value",
        "use torch.profiler around monograph.training.TrainStep": "profiler_steps profiler_steps_start",
        "set WANDB_MODE": "wandb_mode",
        "write report_to with the tracker's name; its project is wandb_project": (
            "mlflow_experiment_name mlflow_tracking_uri hf_mlflow_log_artifacts comet_api_key "
            "comet_project_name comet_workspace comet_experiment_config comet_experiment_key comet_mode "
            "comet_online use_swanlab swanlab_project swanlab_experiment_name swanlab_description "
            "swanlab_mode swanlab_workspace swanlab_log_model swanlab_log_completions "
            "swanlab_completion_log_interval swanlab_completion_max_buffer swanlab_api_host swanlab_api_key "
            "swanlab_lark_secret swanlab_lark_webhook_url swanlab_web_host"
        ),
        "`generate` asks on the terminal": (
            "gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens "
            "gradio_temperature"
        ),
        "run lm_eval yourself, on the folder that `monograph merge` writes": (
            "lm_eval_model lm_eval_tasks lm_eval_batch_size lm_eval_post_train"
        ),
        "`monograph merge` reads tensor by tensor": "merge_method",
        "prepared data are one folder": "num_dataset_shards_to_save",
        "documents are tokenised by themselves; sample_packing puts them together": "preprocess_iterable",
        "Ctrl-C and SIGTERM save a checkpoint; save_steps saves more often": "dynamic_checkpoint",
        "it has no effect in axolotl 0.19 either": "lr_div_factor",
    }
)

# Keys that are refused, by what to do instead.
OTHERS_REFUSED: dict[str, str] = words(
    {
        "turn the folder with monograph convert, and write the new one as base_model": "gptq",
        "use a base in 16 bits, or in NF4, FP4, FP8, MXFP8, MXFP4, NVFP4, int4 or int8": "use_onebitllms",
        "write fp16: true, which also scales the loss": "float16",
        "write bf16: false": "float32",
        "write bf16: true, fp16: true, or bf16: false for float32": "torch_dtype",
        "write bf16: true": "fp8 fp8_config",
        "ranks share the data, and with shard_size the base; leave it out": (
            "fp8_enable_fsdp_float8_all_gather context_parallel_size context_parapllel_size "
            "sequence_parallel_degree tensor_parallel_size ring_attn_func heads_k_stride"
        ),
        "it drops tokens, and here every token is served: memory is bounded without it; leave it out": (
            "expert_parallel_token_capacity"
        ),
        "ranks send each other rows through gloo, without DeepEP and its buffers; leave it out": (
            "expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes "
            "expert_parallel_fallback_on_unsupported"
        ),
        "the base stays as it is quantised; write adapter: qlora": "qat",
        "`monograph quantize` writes a quantised folder": "quantization",
        "merge with `monograph merge`; its report says how much is kept": (
            "nvfp4_merge_aware nvfp4_merge_aware_start_step"
        ),
        "experts run in Monograph's own operator; leave it out": "dsv4_fp8_nonexpert_mode dsv4_bf16_all",
        "adapter: qlora quantises all linear layers alike, or the folder says how each is; leave it out": (
            "nonexpert_quantization gemma4_fp8_nonexpert gemma4_nf4_nonexpert"
        ),
        "Llama 4's experts are of a kind that is not known; use another model": "llama4_linearized_experts",
        "it is for GPT-2's Conv1D layers, which are not quantised": "lora_fan_in_fan_out",
        "write it below `peft:`": "loftq_config",
        "write more steps, or a larger lora_r": (
            "relora relora_steps relora_warmup_steps relora_prune_ratio relora_cpu_offload "
            "relora_prune_method"
        ),
        "write lr_scheduler: cosine": (
            "jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps"
        ),
        "layers are not drawn in a run; write adapter: qlora, or unfrozen_parameters with trainer: trl": (
            "lisa_n_layers lisa_step_interval lisa_layers_attribute"
        ),
        "no weight is pruned; write adapter: qlora": "llmcompressor",
        "weights begin as their folder has them; leave it out": "reinit_weights",
        "the loss is cross entropy; leave it out": (
            "diffusion ebft use_eaft eaft_alpha eaft_k liger_use_token_scaling"
        ),
        "leave it out": "peft_layer_replication",
        "only text is trained on; use the text model": (
            "freeze_mm_modules image_size image_resize_algorithm role_boundaries processor_kwargs"
        ),
        "edit config.json of the model's folder": (
            "overrides_of_model_config overrides_of_model_kwargs model_kwargs rope_scaling"
        ),
        "write sample_packing: true; attention is exact": "s2_attention",
        "attention is the model's own; leave it out": (
            "scaling_softmax scaling_softmax_factor scaling_softmax_bias"
        ),
        "rows that no token has cost nothing in training; leave it out": "shrink_embeddings",
        "new rows begin as the mean of the others; write peft_trainable_token_indices": (
            "fix_untrained_tokens"
        ),
        "write tokens: [...], or name reserved tokens in special_tokens": "added_tokens_overrides",
        "write gradient_checkpointing: true, which keeps inputs of blocks alone": "selective_checkpointing",
        "write base_memory: 3GiB, which keeps a quantised base in its files; or leave it out": (
            "layer_offloading ple_cpu_offload"
        ),
        "write rl: dpo, dpo_loss_type: [sigmoid, sft] and dpo_loss_weights": "rpo_alpha",
        "TRL 1.16 has it switched off; leave it out": "dpo_padding_free",
        "the head is Monograph's own; leave it out": "dpo_use_liger_kernel",
        "TRL has it no more; leave it out": "dpo_generate_during_eval dpo_norm_loss dpo_use_logits_to_keep",
        "completions are generated by the trained model itself; leave it out": "vllm",
        "TRL 1.16 has no trainer of rewards for steps; leave it out": "process_reward_model",
        "write sequence_len: longer prompts are left out, longer pairs cut": "max_prompt_len",
        "it is for deepspeed; write torch_compile: true": "deepcompile",
        "start the processes with torchrun; leave it out": (
            "use_ray ray_num_workers ray_run_name resources_per_worker"
        ),
        _STREAM: "pretraining_dataset",
        "write sample_packing: true, which keeps documents apart": "pretraining_sample_concatenation",
        "it is for images and sound, and only text is trained on; leave it out for text": (
            "skip_prepare_dataset"
        ),
        "write shards and shards_idx in the entries of datasets": "dataset_shard_num dataset_shard_idx",
        "copy dataset_prepared_path yourself": "push_dataset_to_hub",
        "remove duplicates from the file": "dataset_exact_deduplication",
        "write shuffle_merged_datasets: false": "curriculum_sampling sample_packing_sequentially",
        "write it into the data, or leave it out": (
            "use_pose pose_max_context_len pose_num_chunks pose_split_on_token_ids"
        ),
        (
            "write learning_rate, which holds for all; or use TRL: SFTTrainer(optimizers=...), with "
            "mg.optimize(trainer.model) as in the README"
        ): "embedding_lr embedding_lr_scale lr_groups",
        "write cosine_min_lr_ratio": "cosine_constant_lr_ratio eta_min",
        "write warmup_ratio, which rises in a line": "lr_quadratic_warmup",
        "the step is Monograph's own; monograph.training.TrainStep is for your own loop": "trainer_cls",
        "`generate` samples: --temperature, --top-p, --top-k": (
            "generation_do_sample generation_temperature generation_top_p generation_top_k"
        ),
        "distillation is TRL's: a script with trl.experimental.gkd and mg.optimize(trainer.model)": (
            "kd_trainer kd_alpha kd_beta kd_ce_alpha kd_normalize_topk kd_temperature kd_temperature_min "
            "kd_online_server kd_online_server_base_url kd_online_timeout kd_online_topk"
        ),
        "rewards are functions by dotted name; write trl: {reward_funcs: [module.function]}": (
            "nemo_gym_enabled nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths "
            "nemo_gym_datasets nemo_gym_dir nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name "
            "nemo_gym_multi_turn nemo_gym_run_timeout nemo_gym_server_timeout nemo_gym_verify_timeout"
        ),
        "layers are not chosen by their spectrum; write lora_target_modules, or peft_layers_to_transform": (
            "spectrum_model_name spectrum_top_fraction"
        ),
        "gradients are not filtered; leave it out": "grokfast_alpha grokfast_lamb",
        "training runs on this machine; leave it out": "hatchery",
        "MoRA is not in PEFT; write adapter: lora": "mora",
        "the router is the model's own; leave it out": "dense_mixer",
        "it is for the optimizer came_pytorch, which is not here; write optimizer: adamw_torch": (
            "adam_beta3 adam_epsilon2"
        ),
        "it is for the optimizer dion, which is not here; write optimizer: adamw_torch": (
            "dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of"
        ),
        "it is for the optimizer q_galore_adamw8bit, which is not here; write optimizer: adamw_torch": (
            "qgalore_rank qgalore_scale qgalore_update_proj_gap qgalore_proj_type qgalore_proj_quant "
            "qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj "
            "qgalore_queue_size"
        ),
    }
)

# Keys that are read as keys of ours.
MEANINGS: dict[str, MeaningOf] = {
    "activation_offloading": meanings.activation_offloading,
    "model_config": meanings.model_config,
    "model_quantization_config": meanings.model_quantization_config,
    "model_quantization_config_kwargs": meanings.quantization_kwargs,
    "trust_remote_code": meanings.trust_remote_code,
    "tokenizer_use_mistral_common": meanings.mistral_common,
    "deepspeed": meanings.deepspeed,
}

# Plugins that only bring kernels; others change what is trained.
KERNEL_PLUGINS = ("cut_cross_entropy", "liger", "kernels")
# Plugins that hand on what a run logs.
TRACKER_PLUGINS = ("swanlab",)

# What other trainers call a key of ours.
OTHER_NAMES: dict[str, str] = words(
    {
        "lora_r": "lora_rank r rank",
        "lora_alpha": "alpha",
        "lora_target_modules": "target_modules lora_target",
        "base_model": "model model_name model_name_or_path",
        "datasets": "dataset",
        "sequence_len": "max_seq_length max_length cutoff_len",
        "sample_packing": "packing",
        "micro_batch_size": "per_device_train_batch_size",
        "eval_batch_size": "per_device_eval_batch_size",
        "num_epochs": "num_train_epochs epochs",
        "learning_rate": "lr",
        "lr_scheduler": "lr_scheduler_type",
        "optimizer": "optim",
        "load_in_4bit": "quantization_bit",
        "peft_use_dora": "use_dora",
        "peft_use_rslora": "use_rslora",
        "lora_modules_to_save": "modules_to_save",
        "seed": "random_seed",
        "torch_compile": "compile",
        "attn_implementation": "flash_attention_2",
        "chat_template": "template",
    }
)

# The same key under a name that is honoured without a word.
SYNONYMS: dict[str, str] = words(
    {
        "dataset_processes": "dataset_num_proc",
        "eval_strategy": "evaluation_strategy",
        "bf16": "bfloat16",
        "adam_epsilon": "adam_eps",
        "chat_template_jinja": "jinja",
        "revision_of_model": "model_revision",
        "shard_size": "dp_shard_size",
        "replicate_size": "dp_replicate_size",
    }
)
