// What the commands about served adapters share.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "monograph/safetensors/checkpoint.h"

namespace monograph::cli {

// --for, required: one of the names of servers.h.
void declare_server(CLI::App& app, std::string& server);
// --max-rank.
void declare_max_rank(CLI::App& app, std::optional<std::uint64_t>& max_rank);

// adapter_model.safetensors of a folder. Throws Error if it has a pickle only.
safetensors::Checkpoint open_adapter(const std::filesystem::path& folder);

}  // namespace monograph::cli
