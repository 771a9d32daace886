// An adapter as PEFT writes it: adapter_model.safetensors, byte for byte, and adapter_config.json;
// and monograph.json, by which merge knows its base.
#pragma once

#include <filesystem>
#include <string>

#include "monograph/train/lora_start.h"

namespace monograph::train {

// What is said beside the factors.
struct AdapterDescription {
  std::string base_model;
  LoraSettings lora;
  double dropout = 0;
  std::string base_sha256;   // checkpoint_hash.h
  bool base_packed = false;  // it was trained on dequantised values
};

// Into `folder`, which exists; each file appears whole.
void write_adapter(const LoraParameters& parameters, const AdapterDescription& description,
                   const std::filesystem::path& folder);

}  // namespace monograph::train
