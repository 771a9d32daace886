// A recipe of `monograph train` as far as the native trainer honours it. Every other key is refused
// by name, unless its value asks for nothing.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/text/json_document.h"
#include "monograph/train/lora_start.h"
#include "monograph/train/schedule.h"

namespace monograph::train {

struct Recipe {
  std::string base_model, output_dir = "outputs/out";
  DType dtype = DType::kBFloat16;
  bool packed_base = false;  // adapter: qlora
  std::optional<bool> in_4_bits;
  std::string attention = "monograph";
  std::string step_mode = "graph";  // of the Python trainer; here there is one step
  LoraSettings lora;
  bool all_linear = false;  // lora_target_linear
  double dropout = 0;
  std::uint64_t seed = 42;
  // Rows
  std::int64_t sequence_len = 2048;
  bool sample_packing = false, shuffle = true;
  std::optional<bool> pad_to_sequence_len;
  std::size_t micro_batch_size = 1, gradient_accumulation_steps = 1;
  std::optional<std::size_t> virtual_shards;
  // Steps
  double num_epochs = 1;
  std::optional<std::size_t> max_steps;
  ScheduleSettings schedule;
  double weight_decay = 0, adam_beta1 = 0.9, adam_beta2 = 0.999, adam_epsilon = 1e-8;
  double max_grad_norm = 1;
  bool gradient_checkpointing = false;
  std::size_t max_bad_steps = 3, logging_steps = 1;
  // Checkpoints: an epoch has so many, or one comes every so many steps, below 1 a share of all.
  std::string save_strategy;  // no, steps, epoch; empty: as the others say
  bool save_first_step = false;
  std::size_t saves_per_epoch = 0;  // 0: as save_steps says; once if that says nothing
  double save_steps = 0;
  std::size_t save_total_limit = 4;  // 0: all
  std::string resume_from;           // a checkpoint, or auto: the last in output_dir
  bool auto_resume = false;          // as auto, if there is one
  // What it says of documents and tokens, as token_recipe.h has it.
  json::Value said_of_tokens;
  // About keys that are ignored, or mean another thing here.
  std::vector<std::string> notices;

  std::size_t leaves() const { return virtual_shards.value_or(gradient_accumulation_steps); }
};

// Throws Error with all that is wrong, a line each.
Recipe read_recipe(std::string_view text, const std::string& source);

}  // namespace monograph::train
