// What a run is, as its checkpoints keep it. The names are those of the recipe's keys, their values
// as the Python trainer writes them (python/monograph/recipe/run/run_identity.py).
#pragma once

#include <string>
#include <vector>

#include "monograph/text/json_document.h"
#include "monograph/train/recipe.h"

namespace monograph::train {

struct RunIdentity {
  json::Value order;        // of the rows: PackedSampler.state_dict
  std::string base_sha256;  // checkpoint_sha256 of the base
  json::Value keys;
};

json::Value keys_of_run(const Recipe& recipe, const std::string& tokens_sha256,
                        const std::string& config_sha256);

// `state`: the trainer_state.json of the checkpoint `source`. Throws Error if it is of another run,
// naming what differs; gives a line for each key that changes what comes and not what was, as the
// learning rate. A key that the checkpoint does not know is passed over.
std::vector<std::string> compare_runs(const json::Value& state, const RunIdentity& own,
                                      const std::string& source);

}  // namespace monograph::train
