#include "monograph/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/hash/checkpoint_hash.h"
#include "monograph/train/token_recipe.h"

namespace monograph::train {
namespace {

constexpr int kMostSteps = 1 << 24;

RowOrderSettings order_of(const Recipe& recipe, const TokenFile& tokens) {
  RowOrderSettings settings;
  settings.capacity = recipe.sequence_len;
  if (recipe.sample_packing)
    settings.max_documents = documents_of_a_row(tokens.lengths(), recipe.sequence_len);
  settings.rows_per_batch = recipe.micro_batch_size;
  settings.batches_per_step = recipe.gradient_accumulation_steps;
  settings.seed = recipe.seed;
  settings.shuffle = recipe.shuffle;
  return settings;
}

StepSettings step_of(const Recipe& recipe) {
  StepSettings settings;
  settings.beta1 = recipe.adam_beta1;
  settings.beta2 = recipe.adam_beta2;
  settings.eps = recipe.adam_epsilon;
  settings.weight_decay = recipe.weight_decay;
  settings.max_grad_norm = recipe.max_grad_norm;
  settings.dropout = recipe.dropout;
  settings.seed = recipe.seed;
  settings.leaves = recipe.leaves();
  settings.recompute = recipe.gradient_checkpointing;
  return settings;
}

bool is_packed(const BaseModel& base) {
  for (const BaseLayer& layer : base.layers()) {
    if (layer.experts.count > 0) return true;
    for (const BaseProjection* const projection : projections_of(layer))
      if (projection->packed) return true;
  }
  return false;
}

void check_packed(const Recipe& recipe, const BaseModel& base) {
  if (!recipe.packed_base || is_packed(base)) return;
  throw Error("base_model: " + recipe.base_model +
              " is not packed, and adapter is qlora; make a folder by monograph quantize, or write "
              "adapter: lora");
}

TokenFile open_tokens(const Recipe& recipe, const std::filesystem::path& path) {
  TokenFile tokens(path);
  check_same_tokens(tokens, recipe.said_of_tokens, recipe.base_model);
  return tokens;
}

}  // namespace

Trainer::Trainer(const Recipe& recipe, const std::filesystem::path& tokens, const Workers& workers)
    : recipe_(recipe),
      workers_(workers),
      base_(recipe.base_model, recipe.dtype),
      tokens_(open_tokens(recipe, tokens)),
      parameters_(start_parameters(recipe.lora, base_, recipe.seed)),
      order_(tokens_.lengths(), order_of(recipe, tokens_)),
      epochs_(epochs_of_run()),
      step_(base_, parameters_, step_of(recipe), workers),
      save_at_(save_steps()) {
  check_packed(recipe, base_);
}

Epochs Trainer::epochs_of_run() {
  const double whole = std::floor(recipe_.num_epochs), part = recipe_.num_epochs - whole;
  // Every epoch is packed here; the count of steps is a float32 number.
  const double about = recipe_.num_epochs * static_cast<double>(order_.steps(0));
  if (about > kMostSteps && !recipe_.max_steps)
    throw Error("num_epochs gives some " + std::to_string(std::llround(about)) + " steps, wanted " +
                std::to_string(kMostSteps) + " at most; lower it, or write max_steps");
  Epochs epochs;
  for (std::size_t epoch = 0; static_cast<double>(epoch) < whole + (part > 0 ? 1 : 0); ++epoch) {
    const std::size_t steps = order_.steps(epoch);
    std::size_t wanted = steps;
    if (static_cast<double>(epoch) >= whole)
      wanted = std::max<std::size_t>(
          1, static_cast<std::size_t>(std::nearbyint(static_cast<double>(steps) * part)));
    if (recipe_.max_steps) wanted = std::min(wanted, *recipe_.max_steps - epochs.total());
    if (wanted == 0) break;
    epochs.lengths.push_back(wanted);
    epochs.last_whole = steps;
  }
  return epochs;
}

std::vector<Batch> Trainer::batches_of(std::size_t step) {
  const Epochs::Place place = epochs_.place(step);
  const auto length = static_cast<std::size_t>(recipe_.sequence_len);
  std::vector<Batch> batches;
  for (const std::vector<std::size_t>& numbers : order_.step(place.epoch, place.step)) {
    std::vector<Document> documents;
    for (const std::size_t number : numbers) documents.push_back(tokens_[number]);
    const std::size_t rows = recipe_.micro_batch_size;
    const std::size_t multiple = recipe_.pad_to_sequence_len.value_or(false) ? length : 8;
    batches.push_back(recipe_.sample_packing
                          ? packed_batch(documents, length * rows, tokens_.pad_token())
                          : padded_batch(documents, rows, multiple, tokens_.pad_token()));
  }
  return batches;
}

StepShape Trainer::shape() {
  StepShape shape;
  shape.leaves = recipe_.leaves();
  shape.recompute = recipe_.gradient_checkpointing;
  shape.drops = recipe_.dropout > 0;
  const std::size_t steps = epochs_.lengths.empty() ? 0 : epochs_.lengths.front();
  for (std::size_t step = 0; step < steps; ++step) {
    const std::vector<Batch> batches = batches_of(step);
    shape.micro_batches = std::max(shape.micro_batches, batches.size());
    for (const Batch& batch : batches)
      if (batch.tokens() > shape.tokens) {
        shape.tokens = batch.tokens();
        shape.length = batch.length;
      }
  }
  return shape;
}

StepReport Trainer::step() {
  const std::vector<Batch> batches = batches_of(progress_.step);
  StepReport report = {};
  report.learning_rate = learning_rate(recipe_.schedule, progress_.step, total());
  report.result = step_(batches, report.learning_rate);
  for (const Batch& batch : batches) {
    report.computed += batch.tokens();
    if (batch.key_lengths.empty()) report.tokens += static_cast<std::size_t>(batch.offsets.back());
    for (const std::int32_t keys : batch.key_lengths)
      report.tokens += static_cast<std::size_t>(keys);
  }
  const auto& [loss, norm, targets] = report.result;
  report.skipped = !std::isfinite(loss) || !std::isfinite(norm);
  if (!report.skipped && norm == 0 && progress_.step == progress_.skipped)
    throw Error(
        "the first gradient is zero: nothing would be learnt. Are the targets of the first step "
        "empty?");
  report.step = ++progress_.step;
  report.epoch = epochs_.share(progress_.step);
  progress_.skipped += report.skipped ? 1 : 0;
  progress_.skipped_in_a_row = report.skipped ? progress_.skipped_in_a_row + 1 : 0;
  return report;
}

std::string Trainer::must_end() const {
  const std::size_t bad = progress_.skipped_in_a_row;
  if (bad < recipe_.max_bad_steps) {
    if (progress_.step < total() || progress_.skipped < progress_.step) return "";
    return "each of the " + std::to_string(progress_.step) +
           " steps had a loss or gradient that is not finite: nothing was learnt";
  }
  return "steps " + std::to_string(progress_.step - bad + 1) + " to " +
         std::to_string(progress_.step) +
         " had a loss or gradient that is not finite (max_bad_steps is " +
         std::to_string(recipe_.max_bad_steps) + "); lower learning_rate";
}

std::set<std::size_t> Trainer::save_steps() const {
  std::set<std::size_t> found;
  if (recipe_.save_strategy != "no") {
    const bool once = recipe_.saves_per_epoch == 0 && recipe_.save_steps == 0;
    found = event_steps(epochs_, once ? 1 : recipe_.saves_per_epoch, recipe_.save_steps);
  }
  if (recipe_.save_first_step) found.insert(1);
  return found;
}

const RunIdentity& Trainer::identity() {
  if (identity_) return *identity_;
  identity_ = {order_.identity(),
               checkpoint_sha256(base_.checkpoint(), workers_.parallel_for, [](std::uint64_t) {}),
               keys_of_run(recipe_, tokens_.sha256(), base_.config_sha256())};
  return *identity_;
}

std::filesystem::path Trainer::save() {
  const std::filesystem::path folder =
      std::filesystem::path(recipe_.output_dir) / ("checkpoint-" + std::to_string(progress_.step));
  write_checkpoint(parameters_, description(), progress_, identity(), folder);
  if (recipe_.save_total_limit > 0)
    keep_last_checkpoints(recipe_.output_dir, recipe_.save_total_limit);
  return folder;
}

std::optional<std::filesystem::path> Trainer::resume() {
  const std::optional<std::filesystem::path> from = checkpoint_to_resume();
  if (from) {
    ReadCheckpoint read = read_checkpoint(*from, identity(), parameters_);
    progress_ = read.progress;
    told_ = std::move(read.told);
  }
  if (progress_.skipped_in_a_row >= recipe_.max_bad_steps) progress_.skipped_in_a_row = 0;
  // They would be kept in the place of this run's, and be gone on from.
  if (const auto last = last_checkpoint(recipe_.output_dir); last && last->step > progress_.step)
    throw Error(
        "output_dir: " + last->folder.string() +
        " is of an earlier run; go on from it (resume_from_checkpoint: auto), move it away, "
        "or write another output_dir");
  return from;
}

std::optional<std::filesystem::path> Trainer::checkpoint_to_resume() const {
  if (recipe_.resume_from.empty() && !recipe_.auto_resume) return std::nullopt;
  if (!recipe_.resume_from.empty() && recipe_.resume_from != "auto") return recipe_.resume_from;
  if (const auto last = last_checkpoint(recipe_.output_dir)) return last->folder;
  if (recipe_.auto_resume) return std::nullopt;
  throw Error("resume_from_checkpoint is auto, and " + recipe_.output_dir +
              " has no checkpoint; leave it out to begin anew");
}

AdapterDescription Trainer::description() {
  return {recipe_.base_model, recipe_.lora, recipe_.dropout, identity().base_sha256,
          is_packed(base_)};
}

void Trainer::write(const std::filesystem::path& folder) {
  write_adapter(parameters_, description(), folder);
}

}  // namespace monograph::train
