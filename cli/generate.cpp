// monograph generate --native: token ids behind token ids, by a base and an adapter, without
// Python.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <memory>

#include "command.h"
#include "convert_folder.h"
#include "monograph/adapter/adapter.h"
#include "monograph/base/error.h"
#include "monograph/text/json_document.h"
#include "monograph/train/decoder.h"
#include "monograph/train/sampling.h"
#include "recorded_base.h"
#include "token_ids.h"

namespace monograph::cli {
namespace {

namespace fs = std::filesystem;
constexpr std::size_t kNewTokens = 256;

struct Options {
  std::string base, adapter, tokens, prompt_ids, dtype = "bf16", stop_ids;
  std::optional<std::uint64_t> max_new_tokens, threads;
  train::Sampling sampling;
  bool native = false, another_base = false, json = false;
};

std::vector<Prompt> prompts_of(const Options& options) {
  if (options.tokens.empty() == options.prompt_ids.empty())
    throw UsageError("wanted --tokens IDS or --prompt-ids FILE, one of the two");
  std::vector<Prompt> prompts;
  if (!options.prompt_ids.empty()) return read_prompts(options.prompt_ids, "--prompt-ids");
  prompts.push_back({"--tokens", read_ids(options.tokens, "--tokens")});
  check_not_empty(prompts.back());
  return prompts;
}

// How many tokens are made behind a prompt. Throws UsageError for what the base has no place for.
std::size_t new_tokens(const Prompt& prompt, const Options& options,
                       const train::ModelConfig& config) {
  for (const std::int64_t id : prompt.ids)
    if (static_cast<std::uint64_t>(id) >= config.vocabulary)
      throw UsageError(prompt.source, "token " + std::to_string(id) + ", wanted 0 to " +
                                          std::to_string(config.vocabulary - 1) +
                                          ", the vocabulary of the base");
  if (config.positions == 0)
    throw Error(options.base +
                "/config.json: max_position_embeddings is missing, wanted the most tokens");
  const std::size_t prompted = prompt.ids.size();
  const std::size_t room = config.positions - std::min(prompted, config.positions);
  const std::size_t wanted = options.max_new_tokens.value_or(std::min(kNewTokens, room));
  if (wanted == 0 || wanted > room)
    throw UsageError(prompt.source, std::to_string(prompted) + " tokens and " +
                                        std::to_string(std::max(wanted, std::size_t{1})) +
                                        " new ones, wanted " + std::to_string(config.positions) +
                                        " together at most, max_position_embeddings of the base");
  return wanted;
}

train::LoraParameters read_adapter(const Options& options, const train::BaseModel& base,
                                   const Session& session) {
  if (options.adapter.empty()) return {};
  const Adapter adapter = Adapter::open(options.adapter);
  train::LoraParameters parameters = train::read_parameters(adapter, base);
  if (options.another_base) return parameters;
  const std::string differs =
      another_base(options.adapter, adapter.checkpoint(), open_model(options.base), session);
  if (!differs.empty())
    throw Error(options.adapter + ": " + differs + "; --another-base answers all the same");
  return parameters;
}

json::Value list_of(const Ids& ids) {
  json::Value list = json::Value::array();
  for (const std::int64_t id : ids) list.append(json::Value::number(id));
  return list;
}

class Answers {
 public:
  Answers(const Options& options, const Session& session)
      : options_(options),
        session_(session),
        prompts_(prompts_of(options)),
        stops_(options.stop_ids.empty() ? read_stops(options.base)
                                        : read_ids(options.stop_ids, "--stop-ids")),
        base_(options.base, options.dtype == "fp32" ? DType::kFloat32 : DType::kBFloat16) {
    for (const Prompt& prompt : prompts_)
      wanted_.push_back(new_tokens(prompt, options, base_.config()));
    parameters_ = read_adapter(options, base_, session);
  }

  void write(const train::Workers& workers) {
    train::Decoder decoder(base_, parameters_, workers);
    for (std::size_t i = 0; i < prompts_.size(); ++i) answer(prompts_[i], wanted_[i], decoder);
  }

 private:
  void answer(const Prompt& prompt, std::size_t wanted, train::Decoder& decoder) {
    const auto begin = std::chrono::steady_clock::now();
    decoder.forget();
    std::span<const float> logits = decoder.append(prompt.ids);
    Ids ids;
    bool stopped = false;
    while (true) {
      throw_if_interrupted();
      ids.push_back(train::choose_token(logits, options_.sampling, decoder.tokens()));
      if (!options_.json) {
        std::printf(ids.size() == 1 ? "%lld" : ",%lld", static_cast<long long>(ids.back()));
        std::fflush(stdout);
      }
      stopped = std::find(stops_.begin(), stops_.end(), ids.back()) != stops_.end();
      if (stopped || ids.size() == wanted) break;
      logits = decoder.append({&ids.back(), 1});
    }
    std::fputs(options_.json ? report(prompt, ids, stopped).c_str() : "\n", stdout);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    char text[120];
    std::snprintf(text, sizeof text, "%zu tokens behind %zu in %.1f s%s", ids.size(),
                  prompt.ids.size(), seconds.count(), stopped ? ", stopped" : "");
    session_.note(text);
  }

  static std::string report(const Prompt& prompt, const Ids& ids, bool stopped) {
    json::Value line = json::Value::object();
    line.set("schema_version", json::Value::number(std::int64_t{1}));
    line.set("prompt", list_of(prompt.ids));
    line.set("tokens", list_of(ids));
    line.set("stopped", json::Value::boolean(stopped));
    return json::dump_line(line) + "\n";
  }

  const Options& options_;
  const Session& session_;
  std::vector<Prompt> prompts_;
  Ids stops_;
  train::BaseModel base_;
  std::vector<std::size_t> wanted_;
  train::LoraParameters parameters_;
};

int generate(const Options& options, const Session& session) {
  Answers answers(options, session);
  ThreadPool pool(threads_of(static_cast<int>(options.threads.value_or(0))));
  const auto each = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  answers.write({each, pool.threads()});
  return kOk;
}

std::string wrong_share(const std::string& text) {
  double share = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), share);
  const bool right =
      error == std::errc() && end == text.data() + text.size() && share > 0 && share <= 1;
  return right ? "" : "is " + text + ", wanted more than 0, at most 1";
}

std::string wrong_seed(const std::string& text) {
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  const bool right = error == std::errc() && end == text.data() + text.size();
  return right ? "" : "is " + text + ", wanted a whole number, 0 to 2^64 - 1";
}

Run declare(CommandLine& line) {
  auto options = std::make_shared<Options>();
  line.add_flag("--native", options->native, "By this program; without it Python answers")
      .required();
  line.add_option("base", options->base, "The base: a folder that finetune trains on").required();
  line.add_option("--adapter", options->adapter, "The adapter; without one the base answers")
      .type_name("FOLDER");
  declare_another_base(line, options->another_base);
  line.add_option("--tokens", options->tokens, "The prompt: 1,2,3").type_name("IDS");
  line.add_option("--prompt-ids", options->prompt_ids, "A file with a prompt in each line")
      .type_name("FILE");
  line.add_option("--max-new-tokens", options->max_new_tokens,
                  "At most; 256, or what max_position_embeddings leaves")
      .between(std::uint64_t{1}, std::uint64_t{1} << 30)
      .type_name("N");
  line.add_option("--temperature", options->sampling.temperature,
                  "0, the default: the likeliest token")
      .finite(0)
      .type_name("T");
  line.add_option("--top-p", options->sampling.top_p,
                  "Among the fewest tokens with this probability; 1")
      .check(wrong_share)
      .type_name("P");
  line.add_option("--seed", options->sampling.seed, "The same seed, the same tokens; 0")
      .check(wrong_seed)
      .type_name("N");
  line.add_option("--stop-ids", options->stop_ids,
                  "Ends behind one of them; eos_token_id of the base by default")
      .type_name("IDS");
  line.add_option("--dtype", options->dtype, "Of activations; as in training")
      .one_of({"bf16", "fp32"})
      .shows_default();
  line.add_option("--threads", options->threads, "Threads; all processors by default")
      .between(std::uint64_t{1}, std::uint64_t{4096})
      .type_name("N");
  line.add_flag("--json", options->json, "Print a JSON object for each prompt");
  return [options](Session& session) { return generate(*options, session); };
}

}  // namespace

const Command kGenerate = {
    "generate",
    "generate text with a checkpoint and an adapter; --native: tokens, without Python",
    "With --native: the tokens that a base with its adapter puts behind a prompt, as ids, for "
    "there is no tokenizer in this program. Each prompt gets a line of ids, the one that ended it "
    "included, and the answer that it would get alone.\n\n"
    "The base is one that monograph finetune trains. The same seed gives the same tokens for any "
    "number of threads. Without --native the command is that of Python, which takes a recipe or "
    "its output folder and answers in text.",
    "monograph generate --native my-llama-nf4 --adapter outputs/out --tokens 1,733,16289\n"
    "monograph generate --native my-llama-nf4 --adapter outputs/out --prompt-ids prompts.txt "
    "--json\n"
    "monograph generate --native my-llama-nf4 --tokens 1,733 --temperature 0.8 --top-p 0.9 --seed "
    "7",
    declare,
};

}  // namespace monograph::cli
