#include "server_option.h"

#include <vector>

#include "monograph/adapter/config.h"
#include "monograph/serving/servers.h"

namespace monograph::cli {

void declare_server(CommandLine& line, std::string& server) {
  std::vector<std::string> names;
  names.reserve(kServers.size());
  for (const ServerName& row : kServers) names.emplace_back(row.option);
  line.add_option("--for", server, "What serves it: vllm, sglang, llama.cpp, peft")
      .required()
      .one_of(names)
      .type_name("SERVER");
}

void declare_max_rank(CommandLine& line, std::optional<std::uint64_t>& max_rank) {
  line.add_option("--max-rank", max_rank,
                  "The largest rank that the server was started for (vLLM: --max-lora-rank)")
      .between(std::uint64_t{1}, kMaxLoraRank)
      .option_text("N");
}

}  // namespace monograph::cli
