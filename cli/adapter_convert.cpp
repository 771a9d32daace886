// monograph adapter convert: the form of an adapter that a server applies.
#include <cstdio>
#include <memory>

#include "adapter.h"
#include "adapter_base.h"
#include "model.h"
#include "monograph/adapter/adapter.h"
#include "monograph/convert/copy_sidecars.h"
#include "monograph/files/atomic_file.h"
#include "monograph/files/staged_folder.h"
#include "monograph/gguf_adapter/gguf_lora.h"
#include "monograph/serving/form.h"
#include "monograph/serving/gguf_tensors.h"
#include "monograph/text/utf8.h"
#include "next_step.h"
#include "recorded_base.h"
#include "server_option.h"

namespace monograph::cli {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::string base, adapter, server, out;
  std::optional<std::uint64_t> max_rank;
  bool json = false, force = false, dry_run = false, another_base = false;
};

constexpr const char* kWeights = "adapter_model.safetensors";

json::Value report_json(const Options& options, const ServingForm& form) {
  const auto count = [](std::uint64_t n) {
    return json::Value::number(static_cast<std::int64_t>(n));
  };
  json::Value value;
  value.set("schema_version", json::Value::number(std::int64_t{1}));
  value.set("base", json::Value::string(options.base));
  value.set("adapter", json::Value::string(options.adapter));
  value.set("for", json::Value::string(options.server));
  value.set("output", json::Value::string(options.out));
  value.set("dry_run", json::Value::boolean(options.dry_run));
  value.set("rank", count(form.rank()));
  value.set("modules", count(form.pairs().size()));
  value.set("zero_modules", count(form.zeros()));
  value.set("rounded_modules", count(form.rounded()));
  json::Value& targets = value.set("target_modules", json::Value::array());
  for (const std::string& name : form.target_modules()) {
    targets.append(json::Value::string(name));
  }
  json::Value& notes = value.set("notes", json::Value::array());
  for (const std::string& note : form.notes()) notes.append(json::Value::string(note));
  return value;
}

std::string report_text(const Options& options, const ServingForm& form) {
  std::string text = std::string(options.dry_run ? "would write " : "wrote ") +
                     printable(options.out) + ": " + std::to_string(form.pairs().size()) +
                     " modules of rank " + std::to_string(form.rank()) + "\n";
  if (form.zeros() != 0) {
    text += std::to_string(form.zeros()) + " of them are zero: the server wants LoRA there too\n";
  }
  text += form.rounded() == 0 ? std::string("every value is exact\n")
                              : "the scale of " + std::to_string(form.rounded()) +
                                    " is no power of two: their B is in fp32, rounded once\n";
  return text;
}

class Convert {
 public:
  Convert(Options options, const Session& session)
      : options_(std::move(options)), session_(session) {}

  int run() {
    if (options_.out.empty()) throw UsageError("--out", "is empty, wanted a name");
    const bool gguf = options_.server == "llama.cpp";
    if (gguf != fs::path(options_.out).extension().string().ends_with(".gguf")) {
      throw UsageError("--out",
                       gguf ? "must end in .gguf: llama.cpp loads a file" : "must be a folder");
    }
    const AdapterBase base(options_.base, options_.server);
    const BaseModules modules(base.weights(), base.config());
    const fs::path config_path = fs::path(options_.adapter) / "adapter_config.json";
    const json::Value adapter_config = read_json(config_path);
    adapter_ = open_adapter_tensors(options_.adapter);
    ServingCheck request;
    request.adapter = &adapter_;
    request.config = &adapter_config;
    request.config_path = config_path.string();
    request.base = &modules;
    request.server = *find_server(options_.server);
    request.max_rank = options_.max_rank;
    if (!options_.another_base) refuse_another_base(base);
    const ServingForm form(request);
    throw_if_interrupted();
    if (gguf) {
      write_file(form, modules, base);
    } else {
      write_folder(form, base);
    }
    std::fputs(options_.json    ? json::dump(report_json(options_, form)).c_str()
               : session_.quiet ? ""
                                : report_text(options_, form).c_str(),
               stdout);
    for (const std::string& note : form.notes()) session_.note(note);
    if (!options_.json && !options_.dry_run) {
      say_next(session_, serve_command(options_.server, options_.base, options_.out, form.rank()));
    }
    return kOk;
  }

 private:
  void refuse_another_base(const AdapterBase& base) const {
    const std::string differs = base.differs(options_.adapter, adapter_, session_);
    if (differs.empty()) return;
    throw Error(options_.adapter + ": " + differs + "; --another-base takes it all the same");
  }

  void write_file(const ServingForm& form, const BaseModules& modules,
                  const AdapterBase& base) const {
    const fs::path target = options_.out;
    std::error_code ignored;
    if (fs::exists(target, ignored) && !options_.force) {
      throw Error(target.string() + ": is already there; --force replaces it");
    }
    check_gguf_lora(form, modules);
    if (options_.dry_run) return;
    std::vector<files::FileId> inputs = adapter_.ids();
    for (const files::FileId& id : base.ids()) inputs.push_back(id);
    write_gguf_lora(form, modules, target, target.stem().string(), inputs);
  }

  void write_folder(const ServingForm& form, const AdapterBase& base) const {
    const std::array inputs = {base.folder(), fs::path(options_.adapter)};
    const auto existing = options_.force ? files::Existing::kReplace : files::Existing::kRefuse;
    if (options_.dry_run) {
      files::StagedFolder::check_target(options_.out, existing, inputs);
      return;
    }
    files::StagedFolder folder(options_.out, existing, inputs);
    safetensors::WriteOptions write;
    write.inputs = adapter_.ids();
    safetensors::Writer writer(folder.path() / kWeights, plan_file(form.specs(), metadata()),
                               write);
    form.write(writer);
    writer.finish();
    files::write_file(folder.path() / "adapter_config.json", json::dump(form.config()));
    copy_sidecars(options_.adapter, folder.path());
    throw_if_interrupted();
    folder.commit();
  }

  // That of the original, which may record its base.
  safetensors::Metadata metadata() const {
    safetensors::Metadata all;
    for (const safetensors::Reader& file : adapter_.files()) {
      all.insert(file.header().metadata.begin(), file.header().metadata.end());
    }
    all["format"] = "pt";
    return all;
  }

  Options options_;
  const Session& session_;
  safetensors::Checkpoint adapter_;
};

Run declare(CommandLine& line) {
  auto options = std::make_shared<Options>();
  line.add_option("base", options->base,
                  "The folder of the base model, or a GGUF file for llama.cpp")
      .required();
  line.add_option("adapter", options->adapter, "The folder of the PEFT adapter").required();
  line.add_option("--out", options->out,
                  "The folder to write; for llama.cpp the file, which ends in .gguf")
      .required();
  declare_server(line, options->server);
  declare_max_rank(line, options->max_rank);
  declare_another_base(line, options->another_base);
  line.add_flag("--force", options->force, "Replace --out if it exists, in one step");
  line.add_flag("--dry-run", options->dry_run, "Check everything, write nothing");
  line.add_flag("--json", options->json, "Print the report as JSON");
  return [options](Session& session) { return Convert(*options, session).run(); };
}

}  // namespace

const Command kAdapterConvert = {
    "convert",
    "write the form of an adapter that a server applies",
    "Write an adapter that a server applies as PEFT applies the original: one rank everywhere "
    "(zeros "
    "behind the smaller ones), the scale inside B, lora_alpha = r, no rsLoRA, no patterns, a list "
    "of "
    "names as target_modules, experts one by one, zeros where the server wants LoRA for a whole "
    "layer. For llama.cpp it is a GGUF file in fp32.\n\n"
    "B times a scale that is a power of two is exact in the type it has; else B becomes fp32, "
    "rounded once. A keeps its bits.\n\n"
    "What no such form can hold is refused: DoRA, replaced modules, trained tokens, biases, and "
    "for "
    "llama.cpp LoRA on a head or an embedding that are one tensor. `monograph merge` writes those "
    "into the base.",
    "monograph adapter convert llama my-lora --for vllm --out my-lora-vllm\n"
    "monograph adapter convert mixtral my-lora --for sglang --out served --max-rank 64\n"
    "monograph adapter convert llama-Q4_K_M.gguf my-lora --for llama.cpp --out my-lora.gguf\n"
    "monograph adapter convert llama my-lora --for llama.cpp --out my-lora.gguf --json",
    declare,
};

}  // namespace monograph::cli
