// --rounding and --calibration: how merged values become codes of a packed output.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "command.h"
#include "monograph/adapter/adapter.h"
#include "monograph/merge/plan.h"

namespace monograph::cli {

struct RoundingOptions {
  std::string how, calibration;
};

void declare_rounding(CommandLine& line, RoundingOptions& options);

// Sets what the command line leaves open in `options`, and the rounding of `settings`, whose format
// is set. `to` is that of --to. What it returns is null or settings.calibration.
std::unique_ptr<Calibration> choose_rounding(RoundingOptions& options, const std::string& to,
                                             std::span<const Adapter> adapters, bool another_base,
                                             const Session& session, MergeSettings& settings);

}  // namespace monograph::cli
