// What the commands about served adapters share.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

namespace monograph::cli {

// --for, required: one of the names of servers.h.
void declare_server(CLI::App& app, std::string& server);
// --max-rank.
void declare_max_rank(CLI::App& app, std::optional<std::uint64_t>& max_rank);

}  // namespace monograph::cli
