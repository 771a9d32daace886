// What a merge tells the person: how much of each change reached the output.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "merge_options.h"
#include "monograph/merge/merge.h"
#include "monograph/text/json_document.h"

namespace monograph::cli {

struct MergeReport {
  std::string base, base_sha256, base_weights, out, format, rounding;
  struct AdapterLine {
    std::string path, sha256;
    double weight;
  };
  std::vector<AdapterLine> adapters;
  std::vector<std::string> notes;
  double threshold = 0;        // rows that keep less count as below
  double error_threshold = 0;  // rows with a larger error along the adapter count as above
  std::size_t calibrated = 0, not_calibrated = 0;  // packed weights, of MergePlan
  std::vector<MergeRow> rows;

  Survival whole() const;
  template <class Test>
  std::size_t rows_with(Test&& test) const {
    return static_cast<std::size_t>(std::count_if(
        rows.begin(), rows.end(), [&](const MergeRow& row) { return test(row.survival); }));
  }
  std::size_t below() const {
    return rows_with([&](const Survival& row) { return row.keeps_less_than(threshold); });
  }
  std::size_t above() const {
    return rows_with([&](const Survival& row) { return row.errs_more_than(error_threshold); });
  }
};

// The `shown` worst rows, worst first, and a line for the whole.
std::string report_text(const MergeReport& report, std::size_t shown);
// Where the model lies, and what can be done with it.
std::string wrote_text(const MergeReport& report);
json::Value report_json(const MergeReport& report);
// Of a dry run: how many weights would change, how many bytes be written.
json::Value dry_run_json(const MergeReport& report, std::size_t changed, std::size_t weights,
                         std::uint64_t bytes);

// What --dry-run prints: `bytes` would be written.
void print_dry_run(const MergeReport& report, const MergePlan& plan, std::uint64_t bytes,
                   const MergeOptions& options);
// What a merge prints; failed: nothing was written.
void print_report(const MergeReport& report, const MergeOptions& options, bool failed,
                  const Session& session);

// Weights beyond --fail-below or --fail-above.
std::size_t failures(const MergeReport& report, const MergeOptions& options);
// Of weights beyond --warn-below and --warn-above, and of failures.
void warn(const MergeReport& report, const MergeOptions& options, bool can_feed_back, bool failed,
          const Session& session);

}  // namespace monograph::cli
