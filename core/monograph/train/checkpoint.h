// Checkpoints of a run, `checkpoint-N`: the adapter, the optimizer's state and how far the run is,
// as the Python trainer writes and reads them, so that either goes on from the other's. A folder of
// that name is complete.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "monograph/train/adapter_file.h"
#include "monograph/train/lora_parameters.h"
#include "monograph/train/run_identity.h"

namespace monograph::train {

struct Progress {
  std::size_t step = 0, skipped = 0, skipped_in_a_row = 0;
};

void write_checkpoint(const LoraParameters& parameters, const AdapterDescription& description,
                      const Progress& progress, const RunIdentity& identity,
                      const std::filesystem::path& folder);

struct ReadCheckpoint {
  Progress progress;
  std::vector<std::string> told;  // what the run does in another way from here on, a line each
};
// Parameters, moments and steps into `parameters`. Throws Error if it is of another run, naming
// what differs, or not whole.
ReadCheckpoint read_checkpoint(const std::filesystem::path& folder, const RunIdentity& identity,
                               LoraParameters& parameters);

struct LastCheckpoint {
  std::size_t step;
  std::filesystem::path folder;
};
// That of the largest step, if there is one.
std::optional<LastCheckpoint> last_checkpoint(const std::filesystem::path& output_dir);
// Removes all but the last `limit`.
void keep_last_checkpoints(const std::filesystem::path& output_dir, std::size_t limit);

}  // namespace monograph::train
