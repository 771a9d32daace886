// Whether a base is the one that an adapter was trained on, as the adapter records it.
#pragma once

#include <filesystem>
#include <string>

#include "command_line.h"
#include "model.h"
#include "monograph/adapter/recorded_base.h"
#include "monograph/cpu/parallel.h"
#include "monograph/gguf/file_reader.h"
#include "session.h"

namespace monograph::cli {

// The hash of a checkpoint, with a bar.
std::string hash_of(const safetensors::Checkpoint& checkpoint, const char* label,
                    const Session& session, ParallelFor parallel_for);
std::string hash_of(const gguf::FileReader& file, const char* label, const Session& session);

// --another-base.
void declare_another_base(CommandLine& line, bool& another_base);

// What differs; empty if the base is the recorded one or none is recorded. Hashes the base only if
// there is something to compare with.
std::string another_base(const std::filesystem::path& folder,
                         const safetensors::Checkpoint& adapter, const Model& base,
                         const Session& session);
std::string another_base(const std::filesystem::path& folder,
                         const safetensors::Checkpoint& adapter, const gguf::FileReader& base,
                         const Session& session);

}  // namespace monograph::cli
