#include "server_option.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <vector>

#include "monograph/adapter/config.h"
#include "monograph/serving/servers.h"
#include "next_step.h"

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

std::string serve_command(std::string_view server, const std::string& base,
                          const std::string& adapter, std::uint64_t rank) {
  std::filesystem::path path = adapter;
  if (!path.has_filename()) path = path.parent_path();
  const std::string named = shell_word(path.filename().string() + "=" + adapter);
  // vLLM takes these ranks alone.
  constexpr std::array<std::uint64_t, 9> kVllmRanks = {1, 8, 16, 32, 64, 128, 256, 320, 512};
  const auto* const enough = std::lower_bound(kVllmRanks.begin(), kVllmRanks.end(), rank);
  if (server == "vllm") {
    return "vllm serve " + shell_word(base) + " --enable-lora --max-lora-rank " +
           std::to_string(enough == kVllmRanks.end() ? rank : *enough) + " --lora-modules " + named;
  }
  if (server == "sglang") {
    return "python -m sglang.launch_server --model-path " + shell_word(base) + " --lora-paths " +
           named;
  }
  if (server == "llama.cpp") return "llama-cli -m BASE.gguf --lora " + shell_word(adapter);
  return "PeftModel.from_pretrained(model, \"" + adapter + "\") in Python";
}

}  // namespace monograph::cli
