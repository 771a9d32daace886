// An adapter as a GGUF file, which llama.cpp loads beside a model of the same architecture
// (--lora).
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "monograph/files/file_ops.h"
#include "monograph/serving/form.h"

namespace monograph {

// Writes `form`, made for Server::kLlamaCpp, to a new file that appears complete or not at all:
// version 3, little endian, fp32. lora_a is [rank, inputs] and lora_b [outputs, rank]; of an
// embedding lora_a is [tokens, rank]; of experts both have the expert in front. Returns the number
// of tensors. Throws Error as gguf_tensors does.
std::size_t write_gguf_lora(const ServingForm& form, const BaseModules& base,
                            const std::filesystem::path& target, const std::string& name,
                            std::span<const files::FileId> inputs);

}  // namespace monograph
