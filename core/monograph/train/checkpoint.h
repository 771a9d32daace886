// Checkpoints of a run, `checkpoint-N`: the adapter, the optimizer's state and how far the run is,
// as the Python trainer writes and reads them, so that either goes on from the other's. A folder of
// that name is complete.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "monograph/text/json_document.h"
#include "monograph/train/adapter_file.h"
#include "monograph/train/lora_parameters.h"

namespace monograph::train {

struct Progress {
  std::size_t step = 0, skipped = 0, skipped_in_a_row = 0;
};

// What a run is: a checkpoint of another one is refused.
struct RunIdentity {
  json::Value order;        // of the rows: PackedSampler.state_dict
  std::string base_sha256;  // checkpoint_sha256 of the base
  json::Value keys;         // of the recipe, and the hash of the tokens
};

void write_checkpoint(const LoraParameters& parameters, const AdapterDescription& description,
                      const Progress& progress, const RunIdentity& identity,
                      const std::filesystem::path& folder);

// Parameters, moments and steps into `parameters`. Throws Error if it is of another run, naming
// what differs, or not whole.
Progress read_checkpoint(const std::filesystem::path& folder, const RunIdentity& identity,
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
