// The programs that serve an adapter beside its base.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace monograph {

enum class Server : std::uint8_t { kVllm, kSglang, kLlamaCpp, kPeft };

struct ServerName {
  Server server;
  std::string_view option;  // on the command line
  std::string_view title;   // in a sentence
};

inline constexpr std::array kServers = {ServerName{Server::kVllm, "vllm", "vLLM"},
                                        ServerName{Server::kSglang, "sglang", "SGLang"},
                                        ServerName{Server::kLlamaCpp, "llama.cpp", "llama.cpp"},
                                        ServerName{Server::kPeft, "peft", "PEFT"}};

constexpr std::string_view title_of(Server server) {
  return kServers[static_cast<std::size_t>(server)].title;
}
static_assert(title_of(Server::kPeft) == "PEFT");

constexpr std::optional<Server> find_server(std::string_view option) {
  for (const ServerName& row : kServers) {
    if (row.option == option) return row.server;
  }
  return std::nullopt;
}

}  // namespace monograph
