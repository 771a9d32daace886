#include "convert_folder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <thread>

#include "monograph/convert/copy_sidecars.h"
#include "monograph/files/atomic_file.h"
#include "monograph/files/mapped_file.h"
#include "monograph/files/staged_folder.h"
#include "monograph/merge/packed.h"
#include "monograph/quant_methods/packed_parts.h"
#include "next_step.h"
#include "table.h"

namespace monograph::cli {
namespace {

namespace fs = std::filesystem;
using safetensors::FilePlan;
using safetensors::TensorSpec;

struct Report {
  struct Row {
    std::uint64_t weights = 0, elements = 0, from_bytes = 0, to_bytes = 0;
  };
  std::map<std::string, Row> rows;  // by "bf16 -> nf4"
  Row total;
  std::size_t files = 0;
  double seconds = 0;

  static double bits(std::uint64_t bytes, std::uint64_t elements) {
    return elements == 0 ? 0 : 8.0 * static_cast<double>(bytes) / static_cast<double>(elements);
  }
};

std::string target_format(const Conversion& conversion) {
  switch (conversion.action) {
    case Action::kQuantize:
      return std::string(written_name(conversion.format)) + (conversion.double_quant ? "+dq" : "");
    case Action::kCast:
      return std::string(short_name(stored(conversion.dtype)));
    case Action::kTurn:
      return conversion.words->bits == 4 ? "int4" : "int8";
    case Action::kCopy:
      break;
  }
  return "kept";
}

Report make_report(const std::vector<Conversion>& conversions) {
  Report report;
  for (const Conversion& conversion : conversions) {
    const Weight& weight = *conversion.weight;
    Report::Row one = {1, weight.elements, weight.size_bytes, 0};
    for (const TensorSpec& spec : specs_of(conversion)) one.to_bytes += size_bytes(spec);
    const std::string name = std::string(weight.format) + " -> " + target_format(conversion);
    for (Report::Row* row : {&report.rows[name], &report.total}) {
      row->weights += one.weights;
      row->elements += one.elements;
      row->from_bytes += one.from_bytes;
      row->to_bytes += one.to_bytes;
    }
  }
  return report;
}

json::Value row_json(const Report::Row& row) {
  const auto count = [](std::uint64_t n) {
    return json::Value::number(static_cast<std::int64_t>(n));
  };
  json::Value value;
  value.set("tensors", count(row.weights));
  value.set("weights", count(row.elements));
  value.set("bytes_before", count(row.from_bytes));
  value.set("bytes_after", count(row.to_bytes));
  value.set("bits_per_weight", json::Value::number(Report::bits(row.to_bytes, row.elements)));
  return value;
}

void print_report(const Report& report, const FolderOptions& options) {
  if (options.json) {
    json::Value value;
    value.set("schema_version", json::Value::number(std::int64_t{1}));
    value.set("output", json::Value::string(options.to));
    value.set("dry_run", json::Value::boolean(options.dry_run));
    value.set("files", json::Value::number(static_cast<std::int64_t>(report.files)));
    value.set("seconds", json::Value::number(report.seconds));
    value.set("total", row_json(report.total));
    json::Value& rows = value.set("conversions", json::Value::object());
    for (const auto& [name, row] : report.rows) rows.set(name, row_json(row));
    std::fputs(json::dump(value).c_str(), stdout);
    return;
  }
  Table table({"conversion", ">tensors", ">weights", ">before", ">after", ">bits"});
  const auto add = [&](const std::string& name, const Report::Row& row) {
    table.add({name, std::to_string(row.weights), count_text(row.elements),
               bytes_text(row.from_bytes), bytes_text(row.to_bytes),
               fixed_text(Report::bits(row.to_bytes, row.elements), 2)});
  };
  for (const auto& [name, row] : report.rows) add(name, row);
  add("all", report.total);
  std::fputs(table.text().c_str(), stdout);
  const std::string files = std::to_string(report.files) + (report.files == 1 ? " file" : " files");
  if (options.dry_run) {
    std::printf("\nwould write %s to %s\n", files.c_str(), printable(options.to).c_str());
  } else {
    std::printf("\nwrote %s to %s in %s s\n", files.c_str(), printable(options.to).c_str(),
                fixed_text(report.seconds, 1).c_str());
  }
}

std::vector<FilePlan> plan(const std::vector<Conversion>& conversions, std::uint64_t shard_bytes) {
  std::vector<TensorSpec> specs;
  for (const Conversion& conversion : conversions) {
    for (TensorSpec& spec : specs_of(conversion)) specs.push_back(std::move(spec));
  }
  return safetensors::plan_shards(std::move(specs), {{"format", "pt"}}, shard_bytes);
}

// Quantises what the calibration knows, one weight after another; returns the rest.
std::vector<Conversion> along_inputs(const std::vector<Conversion>& conversions,
                                     const Calibration& calibration,
                                     safetensors::ShardedWriter& writer,
                                     const ConvertOptions& work) {
  ThreadPool pool(work.threads);
  std::vector<Conversion> rest;
  for (const Conversion& conversion : conversions) {
    const CalibratedInputs* inputs = inputs_of(conversion, calibration);
    if (inputs == nullptr) {
      rest.push_back(conversion);
      continue;
    }
    quantize_calibrated(conversion, *inputs, writer,
                        [&](std::size_t count, std::size_t grain, ParallelBody body) {
                          pool.parallel_for(count, grain, body);
                        });
    work.advance(source_bytes(conversion));
  }
  return rest;
}

std::array<fs::path, 1> input_folders(const Model& model) {
  return {model.folder.empty() ? fs::path(".") : model.folder};
}

void write_folder(const char* label, const Model& model, const std::vector<Conversion>& conversions,
                  std::vector<FilePlan> plans, const std::optional<json::Value>& config,
                  const FolderOptions& options, const Session& session,
                  const Calibration* calibration) {
  const std::array inputs = input_folders(model);
  files::StagedFolder folder(options.to, existing_of(options), inputs);
  safetensors::WriteOptions write;
  write.inputs = model.checkpoint.ids();
  safetensors::ShardedWriter writer(folder.path(), std::move(plans), write);
  std::uint64_t total = 0;
  for (const Conversion& conversion : conversions) total += source_bytes(conversion);
  {
    ConvertOptions work;
    work.threads = threads_of(options.jobs);
    work.advance = session.progress(label, total);
    const std::vector<Conversion> others =
        calibration == nullptr ? conversions
                               : along_inputs(conversions, *calibration, writer, work);
    convert(others, writer, work);
  }
  session.note("writing to disk ...");
  writer.finish();
  // A single file without a config has no folder of its own: its neighbours are not part of it.
  if (config) {
    copy_sidecars(inputs[0], folder.path());
    files::write_file(folder.path() / "config.json", json::dump(*config));
    const fs::path card = inputs[0] / "README.md";
    if (fs::exists(card)) {
      files::write_file(folder.path() / "README.md",
                        files::MappedFile(card, json::Limits().bytes).text());
    }
  }
  throw_if_interrupted();
  folder.commit();
}

}  // namespace

const CalibratedInputs* inputs_of(const Conversion& conversion, const Calibration& calibration) {
  if (conversion.action != Action::kQuantize) return nullptr;
  return calibration.find(conversion.weight->name, conversion.weight->shape.back());
}

files::Existing existing_of(const FolderOptions& options) {
  return options.force ? files::Existing::kReplace : files::Existing::kRefuse;
}

int threads_of(int jobs) {
  return jobs > 0 ? jobs : static_cast<int>(std::max(std::thread::hardware_concurrency(), 1u));
}

void declare_jobs(CommandLine& line, int& jobs) {
  line.add_option("-j,--jobs", jobs, "Threads, 1 to 1024; 0 for one a processor")
      .between(0, 1024)
      .option_text("N [0]");
}

void declare_folder_options(CommandLine& line, FolderOptions& options) {
  line.add_option("from", options.from, "The model: a folder, a .safetensors file or an index")
      .required();
  line.add_option("to", options.to, "The folder to make").required();
  line.add_option("--max-shard-size", options.max_shard_bytes, "Largest file: 500MB, 5GB")
      .bytes()
      .option_text("SIZE [5GB]");
  declare_jobs(line, options.jobs);
  line.add_flag("--force", options.force,
                "Replace a checkpoint that is already there, in one step");
  line.add_flag("--dry-run", options.dry_run, "Print what would be written; write nothing");
  line.add_flag("--json", options.json, "Print the report as JSON");
}

int convert_folder(const char* label, const Model& model, std::vector<Conversion> conversions,
                   const std::optional<json::Value>& config, const FolderOptions& options,
                   const Session& session, const Calibration* calibration,
                   const std::vector<std::string>& notes) {
  if (options.to.empty()) throw UsageError("to", "is empty, wanted a folder");
  sort_by_source(conversions);
  std::vector<FilePlan> plans = plan(conversions, options.max_shard_bytes);
  Report report = make_report(conversions);
  report.files = plans.size();
  if (options.dry_run) {
    files::StagedFolder::check_target(options.to, existing_of(options), input_folders(model));
  } else {
    const auto start = std::chrono::steady_clock::now();
    write_folder(label, model, conversions, std::move(plans), config, options, session,
                 calibration);
    const auto time = std::chrono::steady_clock::now() - start;
    report.seconds = std::chrono::duration<double>(time).count();
  }
  if (options.json || options.dry_run || !session.quiet) print_report(report, options);
  for (const std::string& note : notes) session.note("note: " + note);
  if (!options.json && !options.dry_run) {
    const std::string to = shell_word(options.to);
    const bool packed =
        std::any_of(conversions.begin(), conversions.end(), [](const Conversion& one) {
          return one.action == Action::kQuantize || one.action == Action::kTurn;
        });
    say_next(session, packed ? "train it with base_model: " + to +
                                   " in a recipe, or check it: monograph verify " + to
                             : "monograph diff " + shell_word(options.from) + " " + to);
  }
  return kOk;
}

}  // namespace monograph::cli
