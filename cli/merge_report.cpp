#include "merge_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "model.h"
#include "table.h"

namespace monograph::cli {
namespace {

constexpr std::size_t kShownRows = 10;

std::string short_number(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3g", value);
  return text.data();
}

std::vector<std::string> cells(const std::string& name, const std::string& change,
                               const Survival& survival) {
  return {name,
          change,
          short_number(survival.base_norm()),
          short_number(survival.intended_norm()),
          short_number(survival.realised_norm()),
          fixed_text(100 * survival.kept(), 1) + " %",
          fixed_text(survival.error_along_adapter(), 4)};
}

void set_survival(json::Value& value, const Survival& survival) {
  value.set("base_norm", json::Value::number(survival.base_norm()));
  value.set("intended_norm", json::Value::number(survival.intended_norm()));
  value.set("realised_norm", json::Value::number(survival.realised_norm()));
  value.set("cosine", json::Value::number(survival.cosine()));
  value.set("kept", json::Value::number(survival.kept()));
  value.set("error_along_adapter", json::Value::number(survival.error_along_adapter()));
}

}  // namespace

Survival MergeReport::whole() const {
  Survival sum;
  for (const MergeRow& row : rows) sum += row.survival;
  return sum;
}

std::string report_text(const MergeReport& report, std::size_t shown) {
  std::vector<const MergeRow*> rows;
  for (const MergeRow& row : report.rows) rows.push_back(&row);
  std::stable_sort(rows.begin(), rows.end(), [](const MergeRow* a, const MergeRow* b) {
    // The error along the adapter is at least what is not kept. No number is the worst one.
    const double x = a->survival.error_along_adapter(), y = b->survival.error_along_adapter();
    return std::isnan(x) ? !std::isnan(y) : x > y;
  });
  Table table({"weight", "change", ">|base|", ">|meant|", ">|stored|", ">kept", ">error"});
  for (std::size_t i = 0; i < std::min(shown, rows.size()); ++i) {
    table.add(cells(printable(rows[i]->name), std::string(rows[i]->change), rows[i]->survival));
  }
  table.add(cells("all " + std::to_string(rows.size()), "", report.whole()));
  std::string text = table.text();
  if (shown < rows.size()) {
    text += "(the " + std::to_string(shown) + " worst of " + std::to_string(rows.size()) +
            "; --all shows every one)\n";
  }
  return text + "base sha256 " + report.base_sha256 + "\n";
}

std::string wrote_text(const MergeReport& report) {
  const std::string out = printable(report.out);
  return "wrote " + out + " (" + report.format + ")\n";
}

json::Value report_json(const MergeReport& report) {
  json::Value value;
  value.set("schema_version", json::Value::number(std::int64_t{1}));
  json::Value& base = value.set("base", json::Value::object());
  base.set("path", json::Value::string(report.base));
  base.set("sha256", json::Value::string(report.base_sha256));
  base.set("weights", json::Value::string(report.base_weights));
  json::Value& adapters = value.set("adapters", json::Value::array());
  for (const auto& [path, sha256, weight] : report.adapters) {
    json::Value& item = adapters.append(json::Value::object());
    item.set("path", json::Value::string(path));
    item.set("sha256", json::Value::string(sha256));
    item.set("weight", json::Value::number(weight));
  }
  value.set("out", json::Value::string(report.out));
  value.set("format", json::Value::string(report.format));
  value.set("rounding", json::Value::string(report.rounding));
  if (report.calibrated != 0) {
    value.set("calibrated", json::Value::number(static_cast<std::int64_t>(report.calibrated)));
    value.set("not_calibrated",
              json::Value::number(static_cast<std::int64_t>(report.not_calibrated)));
  }
  value.set("threshold", json::Value::number(report.threshold));
  value.set("below_threshold", json::Value::number(static_cast<std::int64_t>(report.below())));
  value.set("error_threshold", json::Value::number(report.error_threshold));
  value.set("above_error_threshold",
            json::Value::number(static_cast<std::int64_t>(report.above())));
  set_survival(value.set("whole", json::Value::object()), report.whole());
  json::Value& rows = value.set("weights", json::Value::array());
  for (const MergeRow& row : report.rows) {
    json::Value item;
    item.set("name", json::Value::string(row.name));
    item.set("change", json::Value::string(row.change));
    item.set("format", json::Value::string(row.format));
    set_survival(item, row.survival);
    rows.append(std::move(item));
  }
  json::Value& notes = value.set("notes", json::Value::array());
  for (const std::string& note : report.notes) notes.append(json::Value::string(note));
  return value;
}

json::Value dry_run_json(const MergeReport& report, std::size_t changed, std::size_t weights,
                         std::uint64_t bytes) {
  json::Value value;
  value.set("schema_version", json::Value::number(std::int64_t{1}));
  value.set("out", json::Value::string(report.out));
  value.set("dry_run", json::Value::boolean(true));
  value.set("rounding", json::Value::string(report.rounding));
  value.set("changed", json::Value::number(static_cast<std::int64_t>(changed)));
  value.set("weights", json::Value::number(static_cast<std::int64_t>(weights)));
  value.set("bytes", json::Value::number(static_cast<std::int64_t>(bytes)));
  json::Value& notes = value.set("notes", json::Value::array());
  for (const std::string& note : report.notes) notes.append(json::Value::string(note));
  return value;
}

void print_dry_run(const MergeReport& report, const MergePlan& plan, std::uint64_t bytes,
                   const MergeOptions& options) {
  std::size_t changed = 0;
  for (const MergedWeight& weight : plan.weights) changed += weight.is_changed() ? 1 : 0;
  const std::size_t weights = plan.weights.size();
  if (options.json) {
    std::fputs(json::dump(dry_run_json(report, changed, weights, bytes)).c_str(), stdout);
    return;
  }
  std::printf("%zu of %zu weights change; %s would be written to %s\n", changed, weights,
              bytes_text(bytes).c_str(), printable(options.out).c_str());
}

void print_report(const MergeReport& report, const MergeOptions& options, bool failed,
                  const Session& session) {
  if (options.json) {
    std::fputs(json::dump(report_json(report)).c_str(), stdout);
  } else if (!session.quiet) {
    const std::size_t shown = options.all ? report.rows.size() : kShownRows;
    std::fputs(report_text(report, shown).c_str(), stdout);
    if (!failed) std::fputs(wrote_text(report).c_str(), stdout);
  }
}

std::size_t failures(const MergeReport& report, const MergeOptions& options) {
  return report.rows_with([&](const Survival& survival) {
    return (options.fail_below && survival.keeps_less_than(*options.fail_below)) ||
           (options.fail_above && survival.errs_more_than(*options.fail_above));
  });
}

void warn(const MergeReport& report, const MergeOptions& options, bool can_feed_back, bool failed,
          const Session& session) {
  const std::string all = " of " + std::to_string(report.rows.size()) + " changed weights ";
  const std::string advice = can_feed_back
                                 ? ": --rounding adapter or a wider output type keeps more"
                                 : ": a wider output type keeps more";
  if (const std::size_t below = report.below(); below > 0) {
    session.warn(std::to_string(below) + all + "keep less than " +
                 fixed_text(100 * options.warn_below, 0) + " % of the adapter's change in " +
                 report.format + advice);
  }
  if (const std::size_t above = report.above(); above > 0) {
    session.warn(std::to_string(above) + all + "have an error along the adapter above " +
                 fixed_text(options.warn_above, 2) + " of its change in " + report.format + advice);
  }
  if (failed) {
    session.warn(std::to_string(failures(report, options)) +
                 " weights are below --fail-below or above --fail-above; " + options.out +
                 " was not written");
  }
}

}  // namespace monograph::cli
