// What a merge tells the person: how much of each change reached the output.
#pragma once

#include <string>
#include <vector>

#include "monograph/merge/merge.h"
#include "monograph/text/json_document.h"

namespace monograph::cli {

struct MergeReport {
  std::string base, base_sha256, base_weights, out, format;
  struct AdapterLine {
    std::string path, sha256;
    double weight;
  };
  std::vector<AdapterLine> adapters;
  std::vector<std::string> notes;
  double threshold = 0;  // rows with a smaller cosine count as below
  std::vector<MergeRow> rows;

  Survival whole() const;
  std::size_t below(double cosine) const;
};

// The `shown` worst rows, worst first, and a line for the whole.
std::string report_text(const MergeReport& report, std::size_t shown);
json::Value report_json(const MergeReport& report);

}  // namespace monograph::cli
