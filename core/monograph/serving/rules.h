// What each server wants of an adapter, as read in its source: docs/explain/serving.md lists the
// rules with the versions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "monograph/adapter/factors.h"
#include "monograph/serving/servers.h"

namespace monograph {

struct ServingCheck {
  const safetensors::Checkpoint* adapter = nullptr;
  const json::Value* config = nullptr;  // adapter_config.json, an object
  std::string config_path;              // for messages
  const BaseModules* base = nullptr;
  Server server = Server::kPeft;
  std::optional<std::uint64_t> max_rank;  // what the server was started with
};

// Every rule that is broken, in the order of the rules. Reads the factors, to find what is not a
// number. What makes no form of the adapter possible beyond them is told by check_serving.
std::vector<ServingFinding> broken_rules(const ServingCheck& check);

}  // namespace monograph
