// monograph adapter check: whether a server applies an adapter as it was trained.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>

#include "adapter.h"
#include "adapter_base.h"
#include "model.h"
#include "monograph/adapter/adapter.h"
#include "monograph/serving/check.h"
#include "monograph/text/utf8.h"
#include "next_step.h"
#include "recorded_base.h"
#include "server_option.h"
#include "table.h"

namespace monograph::cli {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::string base, adapter, server;
  std::optional<std::uint64_t> max_rank;
  bool json = false, all = false, another_base = false;
};

constexpr std::size_t kShownOfRule = 3;

json::Value report_json(const Options& options, const std::vector<ServingFinding>& findings,
                        std::size_t tensors) {
  json::Value value;
  value.set("schema_version", json::Value::number(std::int64_t{1}));
  value.set("base", json::Value::string(options.base));
  value.set("adapter", json::Value::string(options.adapter));
  value.set("for", json::Value::string(options.server));
  value.set("tensors", json::Value::number(static_cast<std::int64_t>(tensors)));
  json::Value& rows = value.set("findings", json::Value::array());
  for (const ServingFinding& finding : findings) {
    json::Value& row = rows.append(json::Value::object());
    row.set("rule", json::Value::string(finding.rule));
    row.set("key", json::Value::string(finding.key));
    row.set("what", json::Value::string(finding.what));
    row.set("convertible", json::Value::boolean(finding.convertible));
  }
  return value;
}

std::string report_text(const Options& options, const std::vector<ServingFinding>& findings,
                        std::size_t tensors) {
  const std::string_view title = title_of(*find_server(options.server));
  if (findings.empty()) {
    return std::string(title) + " applies the adapter: " + std::to_string(tensors) +
           " tensors, no finding\n";
  }
  std::map<std::string_view, std::size_t> of_rule;
  std::string text;
  for (const ServingFinding& finding : findings) {
    if (++of_rule[finding.rule] > kShownOfRule && !options.all) continue;
    text += std::string(finding.rule) + ": " + printable(finding.key) + ": " + finding.what + "\n";
  }
  for (const auto& [rule, count] : of_rule) {
    if (count <= kShownOfRule || options.all) continue;
    text += std::string(rule) + ": " + std::to_string(count - kShownOfRule) +
            " more (--all shows them)\n";
  }
  return text + std::to_string(findings.size()) +
         (findings.size() == 1 ? " finding" : " findings") + " for " + std::string(title) + "\n";
}

// Of all A: its rows.
std::uint64_t highest_rank(const safetensors::Checkpoint& adapter) {
  std::uint64_t rank = 1;
  for (const auto& tensor : adapter.tensors()) {
    const auto& shape = tensor.entry->shape;
    if (tensor.entry->name.find("lora_A") != std::string::npos && shape.size() == 2) {
      rank = std::max<std::uint64_t>(rank, shape.front());
    }
  }
  return rank;
}

std::string next_of(const Options& options, const std::vector<ServingFinding>& findings,
                    std::uint64_t rank) {
  const bool convertible =
      std::all_of(findings.begin(), findings.end(),
                  [](const ServingFinding& finding) { return finding.convertible; });
  const bool gguf = options.server == "llama.cpp";  // which loads no folder of PEFT
  if (findings.empty() && !gguf) {
    return serve_command(options.server, options.base, options.adapter, rank);
  }
  const std::string base = shell_word(options.base), adapter = shell_word(options.adapter);
  if (!convertible) return "monograph merge " + base + " --adapter " + adapter + " --out merged";
  return "monograph adapter convert " + base + " " + adapter + " --for " + options.server +
         " --out " + (gguf ? "adapter.gguf" : "adapter-" + options.server);
}

int check(const Options& options, const Session& session) {
  const AdapterBase base(options.base, options.server);
  const BaseModules modules(base.weights(), base.config());
  const fs::path config_path = fs::path(options.adapter) / "adapter_config.json";
  const json::Value adapter_config = read_json(config_path);
  const safetensors::Checkpoint adapter = open_adapter_tensors(options.adapter);
  ServingCheck request;
  request.adapter = &adapter;
  request.config = &adapter_config;
  request.config_path = config_path.string();
  request.base = &modules;
  request.server = *find_server(options.server);
  request.max_rank = options.max_rank;
  std::vector<ServingFinding> findings = check_serving(request);
  if (!options.another_base) {
    const std::string differs = base.differs(options.adapter, adapter, session);
    if (!differs.empty()) findings.push_back({"another-base", "monograph.json", differs, false});
  }
  const std::size_t tensors = adapter.tensors().size();
  std::fputs(options.json ? json::dump(report_json(options, findings, tensors)).c_str()
                          : report_text(options, findings, tensors).c_str(),
             stdout);
  if (!options.json) say_next(session, next_of(options, findings, highest_rank(adapter)));
  return findings.empty() ? kOk : kFinding;
}

Run declare(CommandLine& line) {
  auto options = std::make_shared<Options>();
  line.add_option("base", options->base,
                  "The folder of the base model, or a GGUF file for llama.cpp")
      .required();
  line.add_option("adapter", options->adapter, "The folder of the PEFT adapter").required();
  declare_server(line, options->server);
  declare_max_rank(line, options->max_rank);
  declare_another_base(line, options->another_base);
  line.add_flag("--all", options->all, "Show every finding, not the first 3 of a rule");
  line.add_flag("--json", options->json, "Print the findings as JSON");
  return [options](Session& session) { return check(*options, session); };
}

}  // namespace

const Command kAdapterCheck = {
    "check",
    "whether a server applies an adapter as it was trained",
    "Say what a server would not apply, or apply otherwise than PEFT: exit code 1 and a line for "
    "each finding with the tensor or the setting it is about, else exit code 0.\n\n"
    "Names and shapes are held one to one against the base; then the rules of the server: names of "
    "tensors, ranks, scale, DoRA, replaced modules, trained tokens, biases, embeddings, a head "
    "that is the embedding, layers that it keeps as one, layouts of experts. "
    "docs/explain/serving.md lists them. Where no finding is beyond cure, `adapter convert` "
    "makes a form of the adapter.",
    "monograph adapter check llama my-lora --for vllm\n"
    "monograph adapter check llama my-lora --for vllm --max-rank 16 --json\n"
    "monograph adapter check mixtral my-lora --for llama.cpp --all",
    declare,
};

}  // namespace monograph::cli
