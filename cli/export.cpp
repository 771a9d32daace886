// monograph export: a model folder as the one file that llama.cpp and Ollama load.
#include "monograph/gguf/export.h"

#include <chrono>
#include <cstdio>
#include <map>
#include <memory>

#include "command.h"
#include "convert_folder.h"
#include "model.h"
#include "monograph/base/error.h"
#include "monograph/files/mapped_file.h"
#include "monograph/gguf_merge/along_inputs.h"
#include "next_step.h"
#include "table.h"

namespace monograph::cli {
namespace {

namespace fs = std::filesystem;
using gguf::ExportedTensor;
using gguf::TensorType;

struct Options {
  std::string from, out, to = "gguf", type, calibration;
  int jobs = 0;
  bool force = false, dry_run = false, json = false;
};

// The default: that of the embedding.
TensorType type_of(const Options& options, const Model& model) {
  if (const auto* info = gguf::find_written_type(options.type)) return info->type;
  for (const Weight& weight : model.weights) {
    if (!weight.name.ends_with("embed_tokens.weight")) continue;
    if (weight.dtype == safetensors::StoredDType::kF16) return TensorType::kF16;
    if (weight.dtype == safetensors::StoredDType::kF32) return TensorType::kF32;
  }
  return TensorType::kBF16;
}

gguf::Tokenizer read_tokenizer(const Model& model, const gguf::ModelConfig& config) {
  const fs::path path = model.folder / "tokenizer.json";
  const json::Value tokenizer = read_json(path, gguf::kTokenizerLimits);
  json::Value tokenizer_config;
  gguf::TokenizerFiles files;
  std::error_code ignored;
  if (const fs::path beside = model.folder / "tokenizer_config.json"; fs::exists(beside, ignored)) {
    tokenizer_config = read_json(beside);
    files.tokenizer_config = &tokenizer_config;
  }
  if (const fs::path jinja = model.folder / "chat_template.jinja"; fs::exists(jinja, ignored)) {
    files.chat_template = files::MappedFile(jinja, json::Limits().bytes).text();
  }
  files.tokenizer = &tokenizer;
  files.config = &*model.config;
  files.source = path.string();
  return gguf::read_tokenizer(files, config.vocabulary);
}

class Export {
 public:
  Export(Options options, const Session& session)
      : options_(std::move(options)), session_(session) {}

  int run() {
    const fs::path target = options_.out;
    if (target.extension() != ".gguf") {
      throw UsageError("out", "must end in .gguf: llama.cpp loads a file");
    }
    std::error_code ignored;
    if (fs::exists(target, ignored) && !options_.force) {
      throw Error(target.string() + ": is already there; --force replaces it");
    }
    const Model model = open_model(options_.from);
    refuse_transforms(model);
    if (!model.config) throw Error(options_.from + ": has no config.json");
    type_ = type_of(options_, model);
    const fs::path config_path = model.folder / "config.json";
    gguf::ModelConfig config = gguf::read_model_config(*model.config, config_path.string());
    const bool keeps_mxfp4 = options_.type.empty() && config.is_gpt_oss();
    gguf::ExportPlan plan =
        gguf::plan_export(model.weights, stack_experts(model.weights, *model.config),
                          std::move(config), type_, keeps_mxfp4);
    read_calibration(plan);
    const gguf::Tokenizer tokenizer = read_tokenizer(model, plan.config);
    std::vector<gguf::TensorInfo> infos;
    for (const ExportedTensor& tensor : plan.tensors) infos.push_back(tensor.info);
    const gguf::FilePlan file = gguf::plan_file(
        gguf::export_metadata(plan, tokenizer, type_, target.stem().string()), std::move(infos));
    throw_if_interrupted();
    const auto start = std::chrono::steady_clock::now();
    if (!options_.dry_run) write(plan, file, model);
    seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::vector<std::string> notes = plan.config.notes;
    notes.insert(notes.end(), tokenizer.notes.begin(), tokenizer.notes.end());
    if (!plan.fallbacks.empty()) {
      const bool large = gguf::info_of(type_).block_elements > 32;
      notes.push_back(
          (large ? "in q5_0, q5_1, q8_0 or f16, because their rows are no multiple of 256: "
                 : "in f16, because their rows are no multiple of 32: ") +
          std::to_string(plan.fallbacks.size()) + " tensors, the first " + plan.fallbacks.front());
    }
    if (tensors_.unknown != 0) {
      notes.push_back(options_.calibration + " has no inputs of " +
                      std::to_string(tensors_.unknown) + " of " +
                      std::to_string(tensors_.known + tensors_.unknown) +
                      " matrices: they are rounded by themselves");
    }
    if (!plan.left_out.empty()) {
      notes.push_back("left out: " + std::to_string(plan.left_out.size()) + " weights, the first " +
                      printable(plan.left_out.front()));
    }
    report(plan, file, tokenizer, notes);
    return kOk;
  }

 private:
  void read_calibration(const gguf::ExportPlan& plan) {
    if (options_.calibration.empty()) return;
    const gguf::TensorTypeInfo& type = gguf::info_of(type_);
    if (type.block_elements == 1) {
      throw UsageError("--calibration",
                       "is for a --type of blocks, --type is " + std::string(type.export_name));
    }
    calibration_ = std::make_unique<Calibration>(options_.calibration);
    tensors_ = gguf::check_calibration(plan, *calibration_);
  }

  void write(const gguf::ExportPlan& plan, const gguf::FilePlan& file, const Model& model) const {
    gguf::ExportOptions work;
    work.threads = threads_of(options_.jobs);
    if (calibration_ != nullptr) {
      work.encoder_of = [this](const ExportedTensor& tensor) {
        return gguf::along_inputs(tensor, *calibration_);
      };
    }
    work.advance = session_.progress("export", file.size_bytes - file.header.size());
    gguf::write_export(plan, file, options_.out, model.checkpoint.ids(), work);
  }

  void report(const gguf::ExportPlan& plan, const gguf::FilePlan& file,
              const gguf::Tokenizer& tokenizer, const std::vector<std::string>& notes) const {
    struct Row {
      std::uint64_t tensors = 0, weights = 0, bytes = 0;
    };
    std::map<std::string, Row> rows;  // by type
    for (const gguf::TensorInfo& tensor : file.tensors) {
      Row& row = rows[std::string(gguf::info_of(tensor.type).name)];
      std::uint64_t elements = 1;
      for (const std::uint64_t size : tensor.shape) elements *= size;
      ++row.tensors;
      row.weights += elements;
      row.bytes += tensor.size_bytes;
    }
    const auto count = [](std::uint64_t n) {
      return json::Value::number(static_cast<std::int64_t>(n));
    };
    if (options_.json) {
      json::Value value;
      value.set("schema_version", json::Value::number(std::int64_t{1}));
      value.set("output", json::Value::string(options_.out));
      value.set("dry_run", json::Value::boolean(options_.dry_run));
      value.set("architecture", json::Value::string(plan.config.architecture->name));
      value.set("type", json::Value::string(gguf::info_of(type_).export_name));
      value.set("tokenizer", json::Value::string(tokenizer.model));
      value.set("pre_tokenizer", json::Value::string(tokenizer.pre));
      value.set("tokens", count(tokenizer.tokens));
      value.set("bytes", count(file.size_bytes));
      value.set("seconds", json::Value::number(seconds_));
      if (calibration_ != nullptr) {
        value.set("calibrated", count(tensors_.known));
        value.set("not_calibrated", count(tensors_.unknown));
      }
      json::Value& types = value.set("types", json::Value::object());
      for (const auto& [name, row] : rows) {
        json::Value& type = types.set(name, json::Value::object());
        type.set("tensors", count(row.tensors));
        type.set("weights", count(row.weights));
        type.set("bytes", count(row.bytes));
      }
      json::Value& lines = value.set("notes", json::Value::array());
      for (const std::string& note : notes) lines.append(json::Value::string(note));
      std::fputs(json::dump(value).c_str(), stdout);
      return;
    }
    if (session_.quiet && !options_.dry_run) return;
    Table table({"type", ">tensors", ">weights", ">bytes"});
    for (const auto& [name, row] : rows) {
      table.add(
          {name, std::to_string(row.tensors), count_text(row.weights), bytes_text(row.bytes)});
    }
    std::fputs(table.text().c_str(), stdout);
    std::printf("\n%s %s: %s, architecture %s, %s tokens (%s, %s)\n",
                options_.dry_run ? "would write" : "wrote", printable(options_.out).c_str(),
                bytes_text(file.size_bytes).c_str(),
                std::string(plan.config.architecture->name).c_str(),
                std::to_string(tokenizer.tokens).c_str(), std::string(tokenizer.model).c_str(),
                std::string(tokenizer.pre).c_str());
    for (const std::string& note : notes) session_.note(note);
    if (options_.dry_run) return;
    const std::string out = shell_word(options_.out);
    const char* here = fs::path(options_.out).is_absolute() ? "" : "./";
    say_next(session_,
             "llama-cli -m " + out + ", or for Ollama a Modelfile with FROM " + here + out);
  }

  Options options_;
  const Session& session_;
  TensorType type_ = TensorType::kBF16;
  double seconds_ = 0;
  std::unique_ptr<Calibration> calibration_;
  gguf::CalibratedTensors tensors_;
};

Run declare(CommandLine& line) {
  auto options = std::make_shared<Options>();
  line.add_option("from", options->from, "The model folder").required();
  line.add_option("out", options->out, "The file to write, which ends in .gguf").required();
  line.add_option("--to", options->to, "The format: gguf").one_of({"gguf"}).type_name("FORMAT");
  line.add_option(
          "--type", options->type,
          "How matrices are stored: f32, f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m, q4_0 or mxfp4; "
          "default: the float type of the embedding, and of experts of gpt-oss in MXFP4 that")
      .one_of({"f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "mxfp4"})
      .type_name("TYPE");
  line.add_option(
          "--calibration", options->calibration,
          "The inputs of the linear layers (calibration.safetensors): codes of blocks are chosen "
          "with error feedback along them, not each by itself")
      .type_name("FILE");
  declare_jobs(line, options->jobs);
  line.add_flag("--force", options->force, "Replace the file if it exists, in one step");
  line.add_flag("--dry-run", options->dry_run, "Check everything, write nothing");
  line.add_flag("--json", options->json, "Print the report as JSON");
  return [options](Session& session) { return Export(*options, session).run(); };
}

}  // namespace

const Command kExport = {
    "export",
    "a model folder as one GGUF file for llama.cpp and Ollama",
    "Write a Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 3, Phi 3 or gpt-oss model, "
    "plain or packed, as one GGUF file with its metadata and tokenizer. Packed weights are decoded "
    "on the way, but for MXFP4 under mxfp4, whose codes and scales are kept; norms, biases and "
    "routers become f32. "
    "The file appears complete or not at all.\n\n"
    "Rows that are no multiple of 32 become f16 where blocks were asked for; under q4_0 and mxfp4 "
    "embedding and head become q8_0, under mxfp4 of a mixture all but its experts. Without --type "
    "the experts of a gpt-oss in MXFP4 stay as they are. q4_k_m, q5_k_m and q6_k give each matrix "
    "the type that "
    "llama-quantize gives it. Experts become one tensor of a layer for gate, up and down each, "
    "however the folder stores them.\n\n"
    "What llama.cpp would compute otherwise is refused by name: other architectures, settings of "
    "config.json that its graph does not have, tokenizers that it cannot follow. Adapters: "
    "`monograph merge` first, or `monograph adapter convert --for llama.cpp`.",
    "monograph export my-llama my-llama.gguf --to gguf\n"
    "monograph export my-qwen3-nf4 my-qwen3.gguf --to gguf --type q8_0\n"
    "monograph export my-llama my-llama-Q4_K_M.gguf --to gguf --type q4_k_m\n"
    "monograph export merged merged-Q4_K_M.gguf --type q4_k_m --calibration "
    "my-lora/calibration.safetensors\n"
    "monograph export my-gemma my-gemma.gguf --to gguf --type q4_0 --dry-run --json",
    declare,
};

}  // namespace monograph::cli
