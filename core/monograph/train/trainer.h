// A run: base, adapter, the order of the rows, and one step after the other.
#pragma once

#include <filesystem>
#include <memory>

#include "monograph/train/checkpoint.h"
#include "monograph/train/recipe.h"
#include "monograph/train/row_order.h"
#include "monograph/train/step_memory.h"
#include "monograph/train/token_file.h"
#include "monograph/train/train_step.h"

namespace monograph::train {

struct StepReport {
  std::size_t step;  // those done, this one included
  double epoch;      // done so far
  StepResult result;
  double learning_rate;
  std::size_t tokens, computed;  // of documents, and with padding
  bool skipped;                  // loss or norm were not finite: nothing has changed
};

class Trainer {
 public:
  // Throws Error for what cannot be trained as the recipe says.
  Trainer(const Recipe& recipe, const std::filesystem::path& tokens, const Workers& workers);

  std::size_t total() const { return epochs_.total(); }
  std::size_t done() const { return progress_.step; }
  std::size_t skipped() const { return progress_.skipped; }
  const BaseModel& base() const { return base_; }
  const LoraParameters& parameters() const { return parameters_; }

  // What a step has: its micro-batches, of which the largest of the first epoch has so many tokens.
  StepShape shape();
  StepMemory memory(const StepShape& shape) const { return step_memory(base_, parameters_, shape); }

  // Throws Error if the first gradient is zero.
  StepReport step();
  // Why the run must end now: max_bad_steps in a row were skipped. Empty: it need not.
  std::string must_end() const;

  // Whether a checkpoint is due behind the steps done.
  bool saves_now() const { return save_at_.contains(progress_.step); }
  // Writes output_dir/checkpoint-N and gives its path; older ones than the recipe keeps are
  // removed.
  std::filesystem::path save();
  // Goes on where the recipe says; the checkpoint, or nothing if the run begins anew. Throws Error
  // if output_dir has checkpoints of later steps: they are of another run.
  std::optional<std::filesystem::path> resume();
  // What a resumed run does in another way than the run of its checkpoint, a line each.
  const std::vector<std::string>& told() const { return told_; }
  // The adapter as it is now, into a folder that exists.
  void write(const std::filesystem::path& folder);

 private:
  Epochs epochs_of_run();
  std::set<std::size_t> save_steps() const;
  std::optional<std::filesystem::path> checkpoint_to_resume() const;
  const RunIdentity& identity();
  AdapterDescription description();
  std::vector<Batch> batches_of(std::size_t step);

  Recipe recipe_;
  Workers workers_;
  BaseModel base_;
  TokenFile tokens_;
  LoraParameters parameters_;
  RowOrder order_;
  Epochs epochs_;
  TrainStep step_;
  std::set<std::size_t> save_at_;
  Progress progress_;
  std::vector<std::string> told_;
  std::optional<RunIdentity> identity_;  // made when it is asked for: it reads all of the base
};

}  // namespace monograph::train
