// monograph merge: a base and adapters become one model.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "block_size.h"
#include "command.h"
#include "convert_folder.h"
#include "merge_base.h"
#include "merge_gguf.h"
#include "merge_options.h"
#include "merge_report.h"
#include "model.h"
#include "monograph/adapter/adapter.h"
#include "monograph/convert/copy_sidecars.h"
#include "monograph/files/atomic_file.h"
#include "monograph/files/staged_folder.h"
#include "monograph/gguf/file_reader.h"
#include "monograph/merge/model_card.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/quant_methods/skip_reason.h"
#include "monograph/text/utf8.h"
#include "next_step.h"
#include "recorded_base.h"
#include "rounding.h"

namespace monograph::cli {
namespace {

namespace fs = std::filesystem;

class Threads {
 public:
  explicit Threads(int jobs) : pool_(threads_of(jobs)) {}
  void operator()(std::size_t count, std::size_t grain, ParallelBody body) {
    pool_.parallel_for(count, grain, body);
  }

 private:
  ThreadPool pool_;
};

std::string base_name(const Model& model, const std::vector<Adapter>& adapters,
                      const std::string& path) {
  for (const Adapter& adapter : adapters) {
    if (!adapter.config().base_model_name_or_path.empty()) {
      return adapter.config().base_model_name_or_path;
    }
  }
  const json::Value* name = model.config ? model.config->find("_name_or_path") : nullptr;
  if (name != nullptr && name->as_string() && !name->text().empty()) return name->text();
  return fs::weakly_canonical(path).filename().string();
}

class Merge {
 public:
  Merge(MergeOptions options, const Session& session)
      : options_(std::move(options)), session_(session), threads_(options_.jobs) {}

  int run() {
    open();
    const MergePlan plan = plan_merge(model_.weights, config_, weighted_, settings_);
    report_.notes = plan.notes;
    report_.calibrated = plan.calibrated;
    report_.not_calibrated = plan.not_calibrated;
    if (plan.not_calibrated > 0) {
      report_.notes.push_back(options_.rounding.calibration + " has no inputs of " +
                              std::to_string(plan.not_calibrated) + " of " +
                              std::to_string(plan.calibrated + plan.not_calibrated) +
                              " packed weights: they are rounded without them");
    }
    std::vector<fs::path> inputs = {model_.folder};
    for (const Adapter& adapter : adapters_) inputs.push_back(adapter.folder());
    const auto existing = options_.force ? files::Existing::kReplace : files::Existing::kRefuse;
    if (options_.dry_run) {
      files::StagedFolder::check_target(options_.out, existing, inputs);
      return dry_run(plan);
    }
    files::StagedFolder folder(options_.out, existing, inputs);
    hash(plan);
    write(plan, folder);
    const bool failed = failures(report_, options_) > 0;
    if (!failed) folder.commit();
    print(failed);
    return failed ? kFinding : kOk;
  }

 private:
  void open() {
    check_given(options_);
    model_ = open_model(options_.base);
    refuse_transforms(model_);
    if (!fs::is_directory(options_.base)) throw Error(options_.base + ": must be a model folder");
    if (model_.config) config_ = *model_.config;
    adapters_ = open_adapters(options_, report_);
    weighted_ = weighted(adapters_, report_);
    take_recorded(options_, adapters_, model_);
    check_base_choice(options_, model_);
    check_experts_choice(options_, adapters_);
    take_groups(options_, model_);
    set_types();
    report_.base = options_.base;
    report_.base_weights = options_.base_weights;
    report_.out = options_.out;
    report_.rounding = options_.rounding.how;
    report_.threshold = options_.warn_below;
    report_.error_threshold = options_.warn_above;
  }

  // Settings of a packed format where there is none.
  static void refuse_unused(const std::string& prefix, bool block, bool asymmetric,
                            bool double_quant, const char* wanted) {
    for (const auto& [given, name] :
         {std::pair(block, "block-size"), std::pair(asymmetric, "asymmetric"),
          std::pair(double_quant, "double-quant")}) {
      if (given) throw UsageError(prefix + name, std::string("is for ") + wanted);
    }
  }

  void set_types() {
    if (options_.to == "bf16") settings_.dtype = DType::kBFloat16;
    if (options_.to == "fp16") settings_.dtype = DType::kFloat16;
    if (options_.to == "fp32") settings_.dtype = DType::kFloat32;
    settings_.format = written_format(options_.to);
    if (settings_.format) {
      settings_.block = block_size(*settings_.format, options_.block);
      settings_.rule = zero_point_rule(*settings_.format, options_.asymmetric);
      check_double_quant(*settings_.format, options_.double_quant);
      settings_.double_quant = options_.double_quant;
    } else {
      refuse_unused("--", options_.block.has_value(), options_.asymmetric, options_.double_quant,
                    "--to a packed format");
    }
    calibration_ = choose_rounding(options_.rounding, options_.to, adapters_,
                                   options_.force || options_.another_base, session_, settings_);
    settings_.base_as = written_format(options_.as);
    if (settings_.base_as) {
      settings_.base_block = block_size(*settings_.base_as, options_.as_block, "--as-");
      settings_.base_rule = zero_point_rule(*settings_.base_as, options_.as_asymmetric, "--as-");
      check_double_quant(*settings_.base_as, options_.as_double_quant, "--as-");
      settings_.base_double_quant = options_.as_double_quant;
      settings_.base_as_experts = options_.as_experts == "packed";
    } else {
      refuse_unused("--as-", options_.as_block.has_value(), options_.as_asymmetric,
                    options_.as_double_quant, "--as, which says how the base was loaded");
    }
    settings_.experts = options_.experts == "stack"      ? ExpertsOutput::kStack
                        : options_.experts == "separate" ? ExpertsOutput::kSeparate
                                                         : ExpertsOutput::kKeep;
    if (model_.config && (settings_.format || settings_.base_as)) check_orientation(*model_.config);
  }

  void hash(const MergePlan& plan) {
    report_.base_sha256 = hash_of(model_.checkpoint, "hashing the base", session_, threads_);
    for (std::size_t i = 0; i < adapters_.size(); ++i) {
      report_.adapters[i].sha256 =
          hash_of(adapters_[i].checkpoint(), "hashing an adapter", session_, threads_);
      check_recorded_base(adapters_[i], report_.base_sha256, options_, settings_, model_, session_);
    }
    check_recorded_values(adapters_, options_, settings_, plan, session_, threads_);
  }

  void write(const MergePlan& plan, const files::StagedFolder& folder) {
    safetensors::Metadata metadata = {{"format", "pt"},
                                      {"monograph.base_sha256", report_.base_sha256},
                                      {"monograph.base_weights", report_.base_weights}};
    for (const auto& adapter : report_.adapters) {
      std::string& all = metadata["monograph.adapters_sha256"];
      all += (all.empty() ? "" : " ") + adapter.sha256;
    }
    const std::vector<safetensors::TensorSpec> specs = plan.specs();
    std::uint64_t total = 0;
    for (const safetensors::TensorSpec& spec : specs) total += size_bytes(spec);
    {
      safetensors::WriteOptions write_options;
      write_options.inputs = model_.checkpoint.ids();
      safetensors::ShardedWriter writer(
          folder.path(), plan_shards(specs, metadata, options_.max_shard_bytes), write_options);
      const auto progress = session_.progress("merging", total);
      report_.rows = run_merge(plan, writer, threads_, progress);
      writer.finish();
    }
    report_.format =
        options_.to == "same" && !report_.rows.empty() ? report_.rows.front().format : options_.to;
    copy_sidecar_files(plan, folder.path());
    if (model_.config) {
      files::write_file(folder.path() / "config.json",
                        json::dump(merged_config(config_, plan, settings_)));
    }
    files::write_file(folder.path() / "README.md", card(folder));
  }

  // An adapter that trains tokens may have added them to the tokenizer beside it.
  void copy_sidecar_files(const MergePlan& plan, const fs::path& to) {
    const fs::path own = plan.trains_vocabulary ? plan.trains_vocabulary->folder() : fs::path();
    std::error_code ignored;
    if (plan.trains_vocabulary != nullptr && fs::exists(own / "tokenizer.json", ignored)) {
      copy_sidecars(own, to, Sidecars::kTokenizer);
      copy_sidecars(model_.folder, to, Sidecars::kAllButTokenizer);
      report_.notes.push_back("the tokenizer is that of " + own.string());
      return;
    }
    copy_sidecars(model_.folder, to);
    if (plan.vocabulary == 0) return;
    report_.notes.push_back("the vocabulary has " + std::to_string(plan.vocabulary) +
                            " rows, and " + own.string() +
                            " has no tokenizer.json: the tokenizer is that of the base, which "
                            "does not know the new ones");
  }

  std::string card(const files::StagedFolder& folder) const {
    Card card;
    card.title = folder.target().filename().string();
    card.base_model = base_name(model_, adapters_, options_.base);
    card.base_sha256 = report_.base_sha256;
    card.base_weights = report_.base_weights;
    card.format = report_.format;
    if (settings_.rounding == Rounding::kAdapter) card.format += ", rounded along the adapter";
    if (settings_.rounding == Rounding::kCalibrated) {
      card.format += ", rounded along the adapter and the inputs of its training";
    }
    for (const auto& [path, sha256, weight] : report_.adapters) {
      card.adapters.push_back({fs::weakly_canonical(path).filename().string(), sha256, weight});
    }
    card.notes = report_.notes;
    return model_card(card, report_.rows);
  }

  int dry_run(const MergePlan& plan) const {
    std::uint64_t total = 0;
    for (const safetensors::TensorSpec& spec : plan.specs()) total += size_bytes(spec);
    print_dry_run(report_, plan, total, options_);
    for (const std::string& note : report_.notes) session_.note(note);
    return kOk;
  }

  void print(bool failed) const {
    print_report(report_, options_, failed, session_);
    for (const std::string& note : report_.notes) session_.note(note);
    const bool can_feed_back = settings_.format && settings_.rounding == Rounding::kNearest;
    warn(report_, options_, can_feed_back, failed, session_);
    if (failed || options_.json) return;
    const std::string out = shell_word(report_.out);
    say_next(session_, "vllm serve " + out + ", or one file for llama.cpp and Ollama: monograph " +
                           "export " + out + " model.gguf");
  }

  MergeOptions options_;
  const Session& session_;
  Threads threads_;
  Model model_;
  json::Value config_;
  std::vector<Adapter> adapters_;
  std::vector<WeightedAdapter> weighted_;
  std::unique_ptr<Calibration> calibration_;
  MergeSettings settings_;
  MergeReport report_;
};

Run declare(CommandLine& line) {
  auto options = std::make_shared<MergeOptions>();
  declare_merge(line, *options);
  return [options](Session& session) {
    const std::string& base = options->base.empty() ? options->base_model : options->base;
    if (gguf::is_gguf(base)) return merge_gguf(*options, session);
    return Merge(*options, session).run();
  };
}

}  // namespace

const Command kMerge = {
    "merge",
    "merge PEFT adapters into a base model",
    "Write the model that a base and one or more PEFT adapters make together.\n\n"
    "Every merged value is computed in 64 bits and rounded once to the type it is stored in. LoRA, "
    "rsLoRA, DoRA, rank and alpha patterns, experts (target_parameters), replaced modules, trained "
    "tokens and lora_bias are "
    "understood; an adapter with any other setting is refused, never half applied.\n\n"
    "--base matters because the answer changes the result: an adapter trained on a 4-bit model "
    "has learned to correct its rounding errors too and belongs on the dequantised weights. An "
    "adapter may record its base: hash, format, block, zero points, double quantisation. Then "
    "neither --base "
    "nor --as is needed, and another base or format needs --another-base.\n\n"
    "Of a base in GGUF the output is the same file: each tensor keeps its type, blocks their "
    "scales "
    "where the merged values fit, and everything that no adapter changes its bytes.\n\n"
    "4-bit outputs are rounded so that the adapter is kept (--rounding adapter): rounding each "
    "value "
    "to the nearest would lose most of a small change.\n\n"
    "The report says for each weight how long the trained change is (|meant|), how long the stored "
    "one (|stored|), the share that is kept, and the error along the directions that the adapter "
    "reads, relative to the change.",
    "monograph merge llama --adapter my-lora --base original --out merged\n"
    "monograph merge llama-nf4 --adapter my-qlora --base dequantized --to bf16 --out merged\n"
    "monograph merge llama --adapter my-qlora --base dequantized --as nf4 --as-double-quant --out "
    "merged\n"
    "monograph merge llama --adapter math:0.7 --adapter code:0.3 --base original --out mixed\n"
    "monograph merge my-llama-Q4_K_M.gguf --adapter my-lora --out merged.gguf\n"
    "monograph merge llama --adapter my-lora --base original --out merged --fail-below 0.95 --json",
    declare,
};

}  // namespace monograph::cli
