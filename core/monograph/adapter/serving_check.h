// Whether a server applies an adapter as it was trained. Knows the rules of each server, as read in
// its source: docs/serving.md lists them with the versions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "monograph/adapter/factors.h"
#include "monograph/adapter/servers.h"

namespace monograph {

struct ServingCheck {
  const safetensors::Checkpoint* adapter = nullptr;
  const json::Value* config = nullptr;  // adapter_config.json, an object
  std::string config_path;              // for messages
  const BaseModules* base = nullptr;
  Server server = Server::kPeft;
  std::optional<std::uint64_t> max_rank;  // what the server was started with
};

// Every rule that is broken, in the order of the rules; empty if the server applies the adapter.
// Reads the factors, to find what is not a number.
std::vector<ServingFinding> check_serving(const ServingCheck& check);

}  // namespace monograph
