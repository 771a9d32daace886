// The options of `monograph merge`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "rounding.h"

namespace monograph::cli {

// As given on the command line; what an adapter records is filled in by take_recorded.
struct MergeOptions {
  std::string base, base_model, out, base_weights, as, as_experts, to = "same", experts = "keep";
  RoundingOptions rounding;
  std::vector<std::string> adapters;
  bool force = false, another_base = false, json = false, all = false, dry_run = false;
  bool double_quant = false, as_double_quant = false, asymmetric = false, as_asymmetric = false;
  std::optional<std::size_t> block, as_block;
  double warn_below = 0.9, warn_above = 0.5;
  std::optional<double> fail_below, fail_above;
  int jobs = 0;
  std::uint64_t max_shard_bytes = 5'000'000'000;
};

struct GivenAdapter {
  std::string path;
  double weight = 1;
};

// DIR or DIR:WEIGHT. A folder whose name ends in a colon and a number is taken as it is.
GivenAdapter parse_adapter(const std::string& text);

// Takes the base from either option. What CLI11 would say of three that are required, for people
// who hold a recipe: throws UsageError.
void check_given(MergeOptions& options);

void declare_merge(CommandLine& line, MergeOptions& options);

}  // namespace monograph::cli
