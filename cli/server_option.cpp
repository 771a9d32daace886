#include "server_option.h"

#include <vector>

#include "monograph/adapter/config.h"
#include "monograph/adapter/servers.h"

namespace monograph::cli {

void declare_server(CLI::App& app, std::string& server) {
  std::vector<std::string> names;
  names.reserve(kServers.size());
  for (const ServerName& row : kServers) names.emplace_back(row.option);
  app.add_option("--for", server, "What serves it: vllm, sglang, llama.cpp, peft")
      ->required()
      ->check(CLI::IsMember(names))
      ->type_name("SERVER");
}

void declare_max_rank(CLI::App& app, std::optional<std::uint64_t>& max_rank) {
  app.add_option("--max-rank", max_rank,
                 "The largest rank that the server was started for (vLLM: --max-lora-rank)")
      ->check(CLI::Range(std::uint64_t{1}, kMaxLoraRank))
      ->option_text("N");
}

}  // namespace monograph::cli
