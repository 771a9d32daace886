// monograph finetune: trains LoRA on a packed base without Python.
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <utility>

#include "command.h"
#include "convert_folder.h"
#include "monograph/base/error.h"
#include "monograph/files/atomic_file.h"
#include "monograph/text/json_document.h"
#include "monograph/train/trainer.h"
#include "output_lock.h"

namespace monograph::cli {
namespace {

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

struct Options {
  std::string config, tokens, output_dir;
  std::optional<std::uint64_t> max_steps, threads;
  bool dry_run = false, json = false;
};

train::Recipe read(const Options& options) {
  std::error_code ignored;
  if (fs::is_directory(options.config, ignored))
    throw UsageError("CONFIG", "'" + options.config + "' is a folder, wanted a YAML file");
  std::ifstream stream(options.config, std::ios::binary);
  if (!stream) throw UsageError("CONFIG", "'" + options.config + "' cannot be read");
  const std::string text((std::istreambuf_iterator<char>(stream)), {});
  train::Recipe recipe;
  try {
    recipe = train::read_recipe(text, options.config);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  if (options.max_steps) recipe.max_steps = static_cast<std::size_t>(*options.max_steps);
  if (!options.output_dir.empty()) recipe.output_dir = options.output_dir;
  return recipe;
}

// getrusage's begins with the peak of the process that started this one: it is for kernels that
// tell nothing else.
double peak_memory_gib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::strtod(line.c_str() + 6, nullptr) / (1 << 20);
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / (1 << 20);
}

double rounded(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return std::strtod(text, nullptr);
}

std::string metrics_line(const train::StepReport& report, double tokens_per_second,
                         std::size_t skipped) {
  using json::Value;
  const auto count = [](std::size_t n) { return Value::number(static_cast<std::int64_t>(n)); };
  Value line = Value::object();
  line.set("step", count(report.step));
  if (report.skipped) {
    line.set("skipped_steps", count(skipped));
    return json::dump_line(line) + "\n";
  }
  const double tokens = static_cast<double>(report.tokens);
  line.set("epoch", Value::number(rounded(report.epoch, 4)));
  line.set("loss", Value::number(static_cast<double>(report.result.loss)));
  line.set("grad_norm", Value::number(static_cast<double>(report.result.grad_norm)));
  line.set("learning_rate", Value::number(report.learning_rate));
  line.set("tokens", count(report.tokens));
  line.set("targets", count(report.result.targets));
  line.set("packing_efficiency",
           Value::number(rounded(tokens / static_cast<double>(report.computed), 4)));
  line.set("tokens_per_second", Value::number(rounded(tokens_per_second, 1)));
  line.set("memory_gib", Value::number(rounded(peak_memory_gib(), 3)));
  return json::dump_line(line) + "\n";
}

// metrics.jsonl: a line behind every step that the recipe wants one of. A resumed run keeps those
// of the steps it has behind it.
class Metrics {
 public:
  Metrics(const fs::path& path, std::size_t done) : path_(path) {
    std::string kept, line;
    std::ifstream before(path, std::ios::binary);
    while (done > 0 && std::getline(before, line)) {
      if (before.eof()) break;  // a killed run left it half written
      const json::Value value = json::parse(line, path.string());
      const json::Value* const step = value.find("step");
      if (step != nullptr && step->as_unsigned().value_or(done + 1) <= done) kept += line + "\n";
    }
    files::write_file(path, kept);
  }
  void add(const std::string& line) {
    errno = 0;
    std::ofstream stream(path_, std::ios::app | std::ios::binary);
    stream << line;
    stream.flush();
    if (!stream) throw files::IoError(path_, "cannot be written", errno == 0 ? EIO : errno);
  }

 private:
  fs::path path_;
};

void steps(train::Trainer& trainer, const train::Recipe& recipe, Session& session) {
  Metrics metrics(fs::path(recipe.output_dir) / "metrics.jsonl", trainer.done());
  Clock::time_point told = Clock::now();
  while (trainer.done() < trainer.total()) {
    try {
      throw_if_interrupted();
    } catch (const Interrupted&) {
      session.note("stopped after step " + std::to_string(trainer.done()) + "; saved " +
                   trainer.save().string() + "; go on with resume_from_checkpoint: auto");
      throw;
    }
    const Clock::time_point before = Clock::now();
    const train::StepReport report = trainer.step();
    const Clock::time_point now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - before).count();
    const double speed = static_cast<double>(report.tokens) / std::max(seconds, 1e-9);
    const bool last = trainer.done() == trainer.total();
    if (report.skipped || last || report.step % recipe.logging_steps == 0)
      metrics.add(metrics_line(report, speed, trainer.skipped()));
    const std::string end = trainer.must_end();
    if (trainer.saves_now() || !end.empty()) trainer.save();
    if (!end.empty()) throw Error(end);
    if (!report.skipped && !last && report.step != 1 && now - told < std::chrono::seconds(10))
      continue;
    told = now;
    char text[160];
    std::snprintf(text, sizeof text, "step %zu/%zu loss %.4f, %.0f tokens/s, %.2f GiB%s",
                  report.step, trainer.total(), static_cast<double>(report.result.loss), speed,
                  peak_memory_gib(), report.skipped ? ", skipped: not finite" : "");
    session.note(text);
  }
}

// --dry-run: recipe, base and tokens fit together, and what a step takes.
int say_what_it_takes(train::Trainer& trainer, const Options& options, const Session& session) {
  const train::StepShape shape = trainer.shape();
  const train::StepMemory memory = trainer.memory(shape);
  const std::array<std::pair<const char*, std::uint64_t>, 5> rows = {
      {{"base", memory.base},
       {"adapter", memory.adapter},
       {"moments", memory.moments},
       {"gradients", memory.gradients},
       {"activations", memory.activations}}};
  const auto count = [](std::uint64_t n) {
    return json::Value::number(static_cast<std::int64_t>(n));
  };
  if (options.json) {
    json::Value report = json::Value::object(), bytes = json::Value::object();
    for (const auto& [name, size] : rows) bytes.set(name, count(size));
    report.set("schema_version", count(1));
    report.set("dry_run", json::Value::boolean(true));
    report.set("steps", count(trainer.total()));
    report.set("micro_batches", count(shape.micro_batches));
    report.set("tokens", count(shape.tokens));
    report.set("bytes", std::move(bytes));
    report.set("total_bytes", count(memory.total()));
    std::fputs(json::dump(report).c_str(), stdout);
    return kOk;
  }
  for (const auto& [name, size] : rows)
    std::printf("%-14s%10.3f GB\n", name, static_cast<double>(size) / 1e9);
  std::printf("%-14s%10.3f GB\n", "together", static_cast<double>(memory.total()) / 1e9);
  session.note(std::to_string(trainer.total()) + " steps of " +
               std::to_string(shape.micro_batches) + " micro-batches, of " +
               std::to_string(shape.tokens) + " tokens at most; nothing was trained");
  return kOk;
}

int finetune(const Options& options, Session& session) {
  const train::Recipe recipe = read(options);
  for (const std::string& notice : recipe.notices) session.note(notice);
  ThreadPool pool(threads_of(static_cast<int>(options.threads.value_or(0))));
  const auto each = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  train::Trainer trainer(recipe, options.tokens, {each, pool.threads()});
  if (options.dry_run) return say_what_it_takes(trainer, options, session);
  const OutputLock lock(recipe.output_dir);
  if (const auto from = trainer.resume()) session.note("resumed from " + from->string());
  for (const std::string& line : trainer.told()) session.note(line);
  session.note(std::to_string(trainer.parameters().values.size()) + " trainable parameters; " +
               std::to_string(trainer.total()) + " steps, " + std::to_string(pool.threads()) +
               " threads");
  steps(trainer, recipe, session);
  trainer.write(recipe.output_dir);
  session.note("adapter in " + recipe.output_dir);
  if (options.json) {
    json::Value report = json::Value::object();
    report.set("schema_version", json::Value::number(std::int64_t{1}));
    report.set("step", json::Value::number(static_cast<std::int64_t>(trainer.done())));
    report.set("output_dir", json::Value::string(recipe.output_dir));
    std::fputs(json::dump(report).c_str(), stdout);
  }
  return kOk;
}

Run declare(CommandLine& line) {
  auto options = std::make_shared<Options>();
  line.add_option("config", options->config, "The recipe, a YAML file").required();
  line.add_option("--tokens", options->tokens,
                  "The documents as tokens: monograph preprocess CONFIG --tokens FILE")
      .required()
      .type_name("FILE");
  line.add_option("--output-dir", options->output_dir, "As the key of the recipe, over it")
      .type_name("FOLDER");
  line.add_option("--max-steps", options->max_steps, "As the key of the recipe, over it")
      .between(std::uint64_t{1}, std::uint64_t{1000000000})
      .type_name("N");
  line.add_option("--threads", options->threads, "Threads; all processors by default")
      .between(std::uint64_t{1}, std::uint64_t{4096})
      .type_name("N");
  line.add_flag("--dry-run", options->dry_run,
                "Check recipe, base and tokens, print the bytes of a step; train nothing");
  line.add_flag("--json", options->json, "Print the report as JSON");
  return [options](Session& session) { return finetune(*options, session); };
}

}  // namespace

const Command kFinetune = {
    "finetune",
    "fine-tune a packed base with LoRA, without Python",
    "Train LoRA on a folder of Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE or Gemma 3 that monograph "
    "quantize made, from a recipe of monograph train and a file of tokens. The adapter has the "
    "bytes that monograph train gives it. A key of the recipe that cannot be honoured is an error "
    "that names it.\n\n"
    "OUTPUT_DIR gets adapter_model.safetensors and adapter_config.json, as PEFT reads them, "
    "metrics.jsonl, and checkpoints, from which either trainer goes on. Ctrl-C writes one more.",
    "monograph preprocess recipe.yml --tokens tokens.safetensors\n"
    "monograph finetune recipe.yml --tokens tokens.safetensors\n"
    "monograph finetune recipe.yml --tokens tokens.safetensors --dry-run\n"
    "monograph finetune recipe.yml --tokens tokens.safetensors --max-steps 20 --output-dir out",
    declare,
};

}  // namespace monograph::cli
