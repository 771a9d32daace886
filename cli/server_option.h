// What the commands about served adapters share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "command_line.h"

namespace monograph::cli {

// --for, required: one of the names of servers.h.
void declare_server(CommandLine& line, std::string& server);
// --max-rank.
void declare_max_rank(CommandLine& line, std::optional<std::uint64_t>& max_rank);

// How the server is started with an adapter of this rank.
std::string serve_command(std::string_view server, const std::string& base,
                          const std::string& adapter, std::uint64_t rank);

}  // namespace monograph::cli
