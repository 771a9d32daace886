#include "merge_gguf.h"

#include <filesystem>
#include <utility>

#include "convert_folder.h"
#include "merge_base.h"
#include "merge_report.h"
#include "model.h"
#include "monograph/gguf/import_config.h"
#include "monograph/gguf/tensor_weights.h"
#include "monograph/gguf_merge/merge_file.h"
#include "monograph/weights/experts.h"
#include "next_step.h"
#include "recorded_base.h"

namespace monograph::cli {
namespace {

namespace fs = std::filesystem;

class MergeGguf {
 public:
  MergeGguf(MergeOptions options, const Session& session)
      : options_(std::move(options)), session_(session), pool_(threads_of(options_.jobs)) {}

  int run() {
    check_options();
    file_ = std::make_shared<const gguf::FileReader>(options_.base);
    const json::Value config = gguf::import_config(*file_, DType::kFloat32);
    const gguf::ImportPlan imported = gguf::plan_import(*file_);
    std::vector<Weight> weights = gguf::weights_of(file_, gguf::TensorNames::kOfTransformers);
    // Gate and up of an expert are one parameter of an adapter, whatever their types are.
    for (Weight& weight : weights) {
      if (parse_expert_name(weight.name)) weight.format = "GGUF";
    }
    MergeSettings settings;
    settings.single_experts = true;
    take_adapters();
    const MergePlan plan = plan_merge(weights, config, weighted_, settings);
    gguf::check_merge(plan, *file_);
    if (options_.dry_run) {
      print_dry_run(report_, plan, file_->all_bytes().size(), options_);
      return kOk;
    }
    hash();
    const bool failed = write(plan, imported);
    print(failed);
    return failed ? kFinding : kOk;
  }

 private:
  void check_options() {
    check_given(options_);
    if (fs::path(options_.out).extension() != ".gguf") {
      throw UsageError("--out", "must end in .gguf: the base is a GGUF file");
    }
    std::error_code ignored;
    if (fs::exists(options_.out, ignored) && !options_.force) {
      throw Error(options_.out + ": is already there; --force replaces it");
    }
    refuse_options_of_folders();
    if (options_.to != "same") {
      throw UsageError("--to",
                       "is '" + options_.to +
                           "', of a base in GGUF wanted 'same': each "
                           "tensor keeps its type; monograph dequantize makes a folder of it");
    }
    if (options_.base_weights == "original") {
      throw UsageError("--base", "is 'original', the values of a GGUF file are 'dequantized'");
    }
    const std::string& how = options_.rounding.how;
    if (how == "calibrated" || !options_.rounding.calibration.empty()) {
      throw UsageError("--rounding",
                       "is 'calibrated', of a base in GGUF wanted 'adapter' or "
                       "'nearest'");
    }
    if (how == "adapter") rounding_ = gguf::BlockRounding::kAdapter;
    if (how == "nearest") rounding_ = gguf::BlockRounding::kNearest;
  }

  void refuse_options_of_folders() const {
    const MergeOptions none;
    const std::pair<bool, const char*> given[] = {
        {options_.experts != none.experts, "--experts"},
        {options_.max_shard_bytes != none.max_shard_bytes, "--max-shard-size"},
        {options_.block.has_value(), "--block-size"},
        {options_.asymmetric, "--asymmetric"},
        {options_.double_quant, "--double-quant"},
        {!options_.as.empty(), "--as"},
        {options_.as_block.has_value(), "--as-block-size"},
        {options_.as_asymmetric, "--as-asymmetric"},
        {options_.as_double_quant, "--as-double-quant"},
        {!options_.as_experts.empty(), "--as-experts"},
    };
    for (const auto& [is_given, name] : given) {
      if (!is_given) continue;
      throw UsageError(
          name,
          "is one of those that are not for a base in GGUF: the output is one file, and "
          "its blocks stay as they are");
    }
  }

  void take_adapters() {
    adapters_ = open_adapters(options_, report_);
    weighted_ = weighted(adapters_, report_);
    report_.base = options_.base;
    report_.base_weights = "dequantized";
    report_.out = options_.out;
    report_.format = "the types of the base";
    report_.rounding = options_.rounding.how.empty() ? "adapter" : options_.rounding.how;
    report_.threshold = options_.warn_below;
    report_.error_threshold = options_.warn_above;
  }

  void parallel(std::size_t count, std::size_t grain, ParallelBody body) {
    pool_.parallel_for(count, grain, body);
  }

  void hash() {
    report_.base_sha256 = hash_of(*file_, "hashing the base", session_);
    const auto threads = [this](std::size_t count, std::size_t grain, ParallelBody body) {
      parallel(count, grain, body);
    };
    for (std::size_t i = 0; i < adapters_.size(); ++i) {
      const Adapter& adapter = adapters_[i];
      report_.adapters[i].sha256 =
          hash_of(adapter.checkpoint(), "hashing an adapter", session_, threads);
      const std::string& trained_on = adapter.recorded_base().sha256;
      if (trained_on.empty() || trained_on == report_.base_sha256) continue;
      tell_difference(adapter,
                      "was trained on the base with hash " + trained_on + ", this one has " +
                          report_.base_sha256,
                      options_, session_);
    }
  }

  // Whether nothing was written, because a threshold was passed.
  bool write(const MergePlan& plan, const gguf::ImportPlan& imported) {
    std::vector<files::FileId> inputs = {file_->id()};
    for (const Adapter& adapter : adapters_) {
      for (const files::FileId& id : adapter.checkpoint().ids()) inputs.push_back(id);
    }
    const gguf::FilePlan out = gguf::same_file(*file_);
    gguf::FileWriter writer(options_.out, out, inputs);
    {
      const auto progress = session_.progress("merging", out.size_bytes - out.header.size());
      report_.rows = gguf::write_merge(
          plan, imported, *file_, rounding_, writer,
          [this](std::size_t count, std::size_t grain, ParallelBody body) {
            parallel(count, grain, body);
          },
          progress);
    }
    const bool failed = failures(report_, options_) > 0;
    if (!failed) writer.finish();
    return failed;
  }

  void print(bool failed) const {
    print_report(report_, options_, failed, session_);
    warn(report_, options_, rounding_ != gguf::BlockRounding::kAdapter, failed, session_);
    if (!failed && !options_.json) say_next(session_, "llama-cli -m " + shell_word(report_.out));
  }

  MergeOptions options_;
  const Session& session_;
  ThreadPool pool_;
  std::shared_ptr<const gguf::FileReader> file_;
  std::vector<Adapter> adapters_;
  std::vector<WeightedAdapter> weighted_;
  gguf::BlockRounding rounding_ = gguf::BlockRounding::kByType;
  MergeReport report_;
};

}  // namespace

int merge_gguf(const MergeOptions& options, const Session& session) {
  return MergeGguf(options, session).run();
}

}  // namespace monograph::cli
