#include <algorithm>
#include <cstdio>
#include <map>

#include "gguf_file.h"
#include "inspection_total.h"
#include "monograph/base/error.h"
#include "monograph/gguf/file_reader.h"
#include "monograph/gguf/import_config.h"
#include "next_step.h"
#include "pattern.h"
#include "recorded_base.h"

namespace monograph::cli {
namespace {

using gguf::PairView;
using gguf::TensorInfo;

std::uint64_t elements_of(const TensorInfo& tensor) {
  std::uint64_t elements = 1;
  for (const std::uint64_t size : tensor.shape) elements *= size;
  return elements;
}

std::string type_name(const TensorInfo& tensor) {
  return std::string(gguf::info_of(tensor.type).name);
}

json::Value value_json(const PairView& pair) {
  if (const auto text = pair.text()) return json::Value::string(printable(*text));
  if (pair.type == gguf::ValueType::kBool) return json::Value::boolean(pair.bytes[0] != 0);
  if (const auto whole = pair.whole(); whole && *whole <= INT64_MAX) return count_json(*whole);
  if (const auto number = pair.number()) return json::Value::number(*number);
  return json::Value::string(std::to_string(pair.count) + " x " +
                             std::string(name_of(pair.element)));
}

std::string value_text(const PairView& pair) {
  if (const auto text = pair.text()) return printable(*text);
  if (pair.type == gguf::ValueType::kBool) return pair.bytes[0] != 0 ? "true" : "false";
  if (const auto whole = pair.whole()) return std::to_string(*whole);
  if (const auto number = pair.number()) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", *number);
    return text;
  }
  return std::to_string(pair.count) + " x " + std::string(name_of(pair.element));
}

struct Report {
  std::vector<const TensorInfo*> tensors;
  std::map<std::string, InspectionTotal> by_format;
  InspectionTotal total;
  std::string sha256;
};

json::Value report_json(const Report& report, const gguf::FileReader& file,
                        const GgufInspection& options) {
  json::Value value;
  value.set("schema_version", count_json(1));
  value.set("path", json::Value::string(file.path().string()));
  value.set("files", count_json(1));
  value.set("architecture", json::Value::string(printable(file.header().architecture())));
  if (!report.sha256.empty()) value.set("sha256", json::Value::string(report.sha256));
  value.set("total", total_json(report.total));
  json::Value& formats = value.set("by_format", json::Value::object());
  for (const auto& [name, total] : report.by_format) formats.set(name, total_json(total));
  json::Value& pairs = value.set("metadata", json::Value::object());
  for (const PairView& pair : file.header().pairs) {
    pairs.append_member(pair.key, value_json(pair));
  }
  if (options.no_tensors) return value;
  json::Value& weights = value.set("weights", json::Value::array());
  for (const TensorInfo* tensor : report.tensors) {
    json::Value& one = weights.append(json::Value::object());
    one.set("name", json::Value::string(tensor->name));
    one.set("format", json::Value::string(type_name(*tensor)));
    json::Value& shape = one.set("shape", json::Value::array());
    for (const std::uint64_t size : tensor->shape) shape.append(count_json(size));
    one.set("bytes", count_json(tensor->size_bytes));
  }
  return value;
}

void print_text(const Report& report, const gguf::FileReader& file, const GgufInspection& options) {
  std::printf("%s%s: GGUF %u, %s, %s, %s weights in %zu tensors, %s bits per weight\n\n",
              options.markdown ? "# " : "", printable(file.path().string()).c_str(),
              file.header().version, printable(file.header().architecture()).c_str(),
              bytes_text(report.total.size_bytes).c_str(),
              count_text(report.total.elements).c_str(), report.tensors.size(),
              fixed_text(report.total.bits(), 2).c_str());
  Table pairs({"key", "type", "value"});
  for (const PairView& pair : file.header().pairs) {
    pairs.add({printable(pair.key), std::string(name_of(pair.type)), value_text(pair)});
  }
  print_table(pairs, options.markdown);
  if (!options.no_tensors) {
    Table table({"name", "format", ">shape", ">bits", ">size"});
    for (const TensorInfo* tensor : report.tensors) {
      InspectionTotal one;
      one.add(elements_of(*tensor), tensor->size_bytes);
      table.add({printable(tensor->name), type_name(*tensor), shape_text(tensor->shape),
                 fixed_text(one.bits(), 2), bytes_text(tensor->size_bytes)});
    }
    print_table(table, options.markdown);
  }
  Table formats = totals_table("format");
  for (const auto& [name, total] : report.by_format) add_total(formats, name, total);
  print_table(formats, options.markdown);
  if (!report.sha256.empty()) std::printf("\nsha256 %s\n", report.sha256.c_str());
}

}  // namespace

Model open_gguf_model(const std::filesystem::path& path, gguf::TensorNames names) {
  const auto file = std::make_shared<const gguf::FileReader>(path);
  Model model;
  model.folder = path.parent_path();
  model.weights = gguf::weights_of(file, names);
  if (names == gguf::TensorNames::kOfFile) return model;
  try {
    model.config = gguf::import_config(*file, DType::kFloat32);
  } catch (const Error&) {
    // Of an architecture without one: it says how experts are stored, and they have names of
    // theirs.
  }
  return model;
}

int inspect_gguf(const std::string& path, const GgufInspection& options, const Session& session) {
  const gguf::FileReader file(path);
  const std::vector<Pattern> names = patterns(options.names);
  Report report;
  for (const TensorInfo& tensor : file.header().tensors) {
    if (!names.empty() && !any_matches(names, tensor.name)) continue;
    report.tensors.push_back(&tensor);
    report.by_format[type_name(tensor)].add(elements_of(tensor), tensor.size_bytes);
    report.total.add(elements_of(tensor), tensor.size_bytes);
  }
  if (options.hash) report.sha256 = hash_of(file, "hashing", session);
  if (options.json) {
    std::fputs(json::dump(report_json(report, file, options)).c_str(), stdout);
    return kOk;
  }
  print_text(report, file, options);
  say_next_of_gguf(file, session);
  return kOk;
}

}  // namespace monograph::cli
