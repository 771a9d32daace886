#include "monograph/train/unread_keys.h"

#include <algorithm>
#include <utility>

namespace monograph::train {

std::string first_name(const std::string& key) {
  constexpr std::pair<const char*, const char*> kNames[] = {
      {"adam_eps", "adam_epsilon"},
      {"bfloat16", "bf16"},
      {"dataset_num_proc", "dataset_processes"},
      {"jinja", "chat_template_jinja"},
  };
  for (const auto& [other, name] : kNames)
    if (key == other) return name;
  return key;
}

bool may_ask_for_nothing(const std::string& key) {
  constexpr const char* kKeys[] = {
      "base_memory",
      "bnb_config_kwargs",
      "calibration",
      "deepspeed",
      "early_stopping_patience",
      "eval_sample_packing",
      "eval_steps",
      "evals_per_epoch",
      "fsdp",
      "fsdp_config",
      "gptq",
      "hub_model_id",
      "load_best_model_at_end",
      "load_in_8bit",
      "lora_alpha_pattern",
      "lora_fan_in_fan_out",
      "lora_model_dir",
      "lora_modules_to_save",
      "lora_rank_pattern",
      "lora_target_parameters",
      "merge_lora",
      "peft",
      "peft_ensure_weight_tying",
      "peft_layers_to_transform",
      "peft_trainable_token_indices",
      "peft_use_dora",
      "reward_model",
      "rl",
      "s2_attention",
      "serve_with",
      "streaming",
      "test_datasets",
      "tiled_mlp",
      "tiled_mlp_num_shards",
      "trust_remote_code",
      "use_tensorboard",
      "use_wandb",
      "val_set_size",
      "wandb_entity",
      "wandb_name",
      "wandb_project",
  };
  return std::find(std::begin(kKeys), std::end(kKeys), key) != std::end(kKeys);
}

const char* reason_to_ignore(const std::string& key) {
  constexpr std::pair<const char*, const char*> kKeys[] = {
      {"dataset_prepared_path", ""},
      {"dataset_processes", ""},
      {"debug", "use preprocess --debug"},
      {"eval_table_size", "nothing is evaluated"},
      {"flash_attention", "attention is Monograph's own"},
      {"gradient_checkpointing_kwargs", "there is one kind of recomputation"},
      {"group_by_length", "packing leaves no padding to save"},
      {"is_llama_derived_model", "the class follows from config.json"},
      {"is_mistral_derived_model", "the class follows from config.json"},
      {"local_rank", "there is one process"},
      {"lora_mlp_kernel", "LoRA is always computed with its projection"},
      {"lora_o_kernel", "LoRA is always computed with its projection"},
      {"lora_qkv_kernel", "LoRA is always computed with its projection"},
      {"low_cpu_mem_usage", "the base is always mapped"},
      {"model_type", "the class follows from config.json"},
      {"strict", "every key is always checked"},
      {"tf32", "it is a mode of NVIDIA GPUs"},
      {"tokenizer_type", "the tokens are in their file"},
      {"wandb_log_model", "files stay in output_dir"},
      {"wandb_watch", "gradients are not logged one by one"},
      {"xformers_attention", "attention is Monograph's own"},
  };
  for (const auto& [name, reason] : kKeys)
    if (key == name) return reason;
  return nullptr;
}

}  // namespace monograph::train
