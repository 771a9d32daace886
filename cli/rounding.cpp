#include "rounding.h"

#include <filesystem>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"

namespace monograph::cli {
namespace {

namespace fs = std::filesystem;
using text::in_quotes;

// The file that lies beside an adapter.
std::string find_calibration(std::span<const Adapter> adapters) {
  std::string found;
  for (const Adapter& adapter : adapters) {
    const fs::path file = adapter.folder() / kCalibrationFile;
    if (!fs::exists(file)) continue;
    if (!found.empty()) {
      throw UsageError("--calibration (" + found + " and " + file.string() +
                       " are both there) is required");
    }
    found = file.string();
  }
  if (found.empty()) {
    throw UsageError("--calibration (no adapter has " + std::string(kCalibrationFile) +
                     " beside it) is required");
  }
  return found;
}

void check_base(const Calibration& calibration, std::span<const Adapter> adapters,
                bool another_base, const Session& session) {
  const std::string seen = calibration.base_sha256();
  for (const Adapter& adapter : adapters) {
    const std::string& trained_on = adapter.recorded_base().sha256;
    if (trained_on.empty() || seen.empty() || trained_on == seen) continue;
    std::string text = calibration.file().string();
    text.append(": was made with the base of hash ").append(seen).append(", ");
    text.append(adapter.folder().string()).append(" was trained on ").append(trained_on);
    if (!another_base) throw Error(text + "; --another-base merges all the same");
    session.warn(text);
  }
}

}  // namespace

void declare_rounding(CommandLine& line, RoundingOptions& options) {
  line.add_option(
          "--rounding", options.how,
          "How values become codes of a packed output: to the 'nearest', or so that what the "
          "'adapter' changes is kept: with error feedback along its directions, or 'calibrated': "
          "also along the inputs that training saw; by default 'adapter' for 4 bits")
      .one_of({"nearest", "adapter", "calibrated"})
      .type_name("HOW");
  line.add_option("--calibration", options.calibration,
                  "The inputs that training saw, for --rounding calibrated; by default "
                  "calibration.safetensors beside the adapter")
      .type_name("FILE");
}

// Rounding along the adapter is for formats whose steps are larger than what an adapter changes.
std::unique_ptr<Calibration> choose_rounding(RoundingOptions& options, const std::string& to,
                                             std::span<const Adapter> adapters, bool another_base,
                                             const Session& session, MergeSettings& settings) {
  if (!options.calibration.empty()) {
    if (options.how.empty()) options.how = "calibrated";
    if (options.how != "calibrated") {
      throw UsageError("--calibration",
                       "is for --rounding calibrated, --rounding is " + in_quotes(options.how));
    }
  }
  if (!options.how.empty() && options.how != "nearest" && !settings.format) {
    throw UsageError("--rounding", "is " + in_quotes(options.how) +
                                       ", which is for a packed output; --to is " + in_quotes(to));
  }
  const bool four_bits = settings.format && find_format(*settings.format)->bits == 4;
  if (options.how.empty()) options.how = four_bits ? "adapter" : "nearest";
  if (options.how == "adapter") settings.rounding = Rounding::kAdapter;
  if (options.how != "calibrated") return nullptr;
  if (options.calibration.empty()) options.calibration = find_calibration(adapters);
  auto calibration = std::make_unique<Calibration>(options.calibration);
  check_base(*calibration, adapters, another_base, session);
  settings.rounding = Rounding::kCalibrated;
  settings.calibration = calibration.get();
  return calibration;
}

}  // namespace monograph::cli
