// What quantize and dequantize share: a new folder from a list of conversions, and the report.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "model.h"
#include "monograph/convert/convert.h"
#include "monograph/files/staged_folder.h"
#include "monograph/merge/calibration.h"
#include "monograph/text/json_document.h"

namespace monograph::cli {

struct FolderOptions {
  std::string from, to;
  std::uint64_t max_shard_bytes = 5'000'000'000;
  int jobs = 0;  // 0: one a processor
  bool force = false, dry_run = false, json = false;
};

// The options that both commands have.
void declare_folder_options(CommandLine& line, FolderOptions& options);

// --jobs of every command that has it, and the threads it means.
void declare_jobs(CommandLine& line, int& jobs);
int threads_of(int jobs);

// What may stand at the target.
files::Existing existing_of(const FolderOptions& options);

// Of a weight that is quantised; nullptr if none are known.
const CalibratedInputs* inputs_of(const Conversion& conversion, const Calibration& calibration);

// Writes the folder options.to, or says what it would write under --dry-run; prints the report.
// `config` is the config.json of the output, if there is one; weights whose inputs `calibration`
// has, which may be null, are quantised along them. `notes` are told behind the report, when
// nothing can be refused any more.
int convert_folder(const char* label, const Model& model, std::vector<Conversion> conversions,
                   const std::optional<json::Value>& config, const FolderOptions& options,
                   const Session& session, const Calibration* calibration = nullptr,
                   const std::vector<std::string>& notes = {});

}  // namespace monograph::cli
