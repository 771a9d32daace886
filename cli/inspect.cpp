// monograph inspect: what is inside a checkpoint.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>

#include "adapter_summary.h"
#include "command.h"
#include "gguf_file.h"
#include "inspection_total.h"
#include "model.h"
#include "monograph/hash/checkpoint_hash.h"
#include "monograph/quant_methods/quant_method.h"
#include "monograph/text/utf8.h"
#include "next_step.h"
#include "pattern.h"

namespace monograph::cli {
namespace {

struct Options {
  std::string path;
  std::vector<std::string> names, formats;
  bool json = false, markdown = false, no_tensors = false, hash = false;
};

struct Report {
  std::string path;
  std::size_t files = 0;
  std::vector<const Weight*> weights;  // those that pass the filters
  std::map<std::string, InspectionTotal> by_format, by_layer;
  std::vector<std::string> layer_order;
  InspectionTotal total;
  std::string sha256;  // with --hash
};

// "model.layers.2" before "model.layers.10".
bool layer_less(const std::string& a, const std::string& b) {
  const auto split = [](const std::string& name) {
    const auto dot = name.rfind('.');
    return std::pair(name.substr(0, dot), name.size() - dot);
  };
  const auto [stem_a, digits_a] = split(a);
  const auto [stem_b, digits_b] = split(b);
  if (stem_a != stem_b) return stem_a < stem_b;
  return digits_a != digits_b ? digits_a < digits_b : a < b;
}

std::string format_text(const Weight& weight) {
  return std::string(weight.format) + (weight.double_quant ? "+dq" : "") +
         (weight.columns.empty() ? "" : "+columns");
}

std::string block_text(const Weight& weight) {
  return weight.block.empty() ? "-" : shape_text(weight.block);
}

Report make_report(const Model& model, const Options& options) {
  Report report;
  report.path = options.path;
  report.files = model.checkpoint.files().size();
  const std::vector<Pattern> names = patterns(options.names);
  // nf4 is every nf4, nf4+dq only the one with quantised scales.
  const auto is_wanted = [&](const Weight& weight) {
    return options.formats.empty() || std::any_of(options.formats.begin(), options.formats.end(),
                                                  [&](const std::string& format) {
                                                    return format == weight.format ||
                                                           format == format_text(weight);
                                                  });
  };
  for (const Weight& weight : model.weights) {
    const bool name_ok = names.empty() || any_matches(names, weight.name);
    if (!name_ok || !is_wanted(weight)) continue;
    report.weights.push_back(&weight);
    report.total.add(weight.elements, weight.size_bytes);
    report.by_format[format_text(weight)].add(weight.elements, weight.size_bytes);
    const std::string layer(layer_of(weight.name));
    if (!report.by_layer.contains(layer)) report.layer_order.push_back(layer);
    report.by_layer[layer].add(weight.elements, weight.size_bytes);
  }
  std::sort(report.layer_order.begin(), report.layer_order.end(), layer_less);
  return report;
}

void print_text(const Report& report, const Options& options) {
  std::printf("%s%s: %zu file%s, %s, %s weights in %zu tensors, %s bits per weight\n\n",
              options.markdown ? "# " : "", printable(report.path).c_str(), report.files,
              report.files == 1 ? "" : "s", bytes_text(report.total.size_bytes).c_str(),
              count_text(report.total.elements).c_str(), report.weights.size(),
              fixed_text(report.total.bits(), 2).c_str());
  if (!options.no_tensors) {
    Table table({"name", "format", "written by", ">shape", ">block", ">bits", ">size"});
    for (const Weight* weight : report.weights) {
      table.add({printable(weight->name), format_text(*weight),
                 weight->is_packed() ? std::string(weight->quant_method) : "-",
                 shape_text(weight->shape), block_text(*weight),
                 fixed_text(weight->bits_per_weight(), 2), bytes_text(weight->size_bytes)});
    }
    print_table(table, options.markdown);
  }
  if (!report.sha256.empty()) std::printf("sha256 %s\n\n", report.sha256.c_str());
  Table formats = totals_table("format");
  for (const auto& [name, total] : report.by_format) add_total(formats, name, total);
  print_table(formats, options.markdown);
  if (report.layer_order.size() < 2) return;
  Table layers = totals_table("layer");
  for (const std::string& layer : report.layer_order) {
    add_total(layers, layer.empty() ? "(outside)" : printable(layer), report.by_layer.at(layer));
  }
  print_table(layers, options.markdown);
}

json::Value weight_json(const Weight& weight) {
  json::Value value;
  value.set("name", json::Value::string(weight.name));
  value.set("format", json::Value::string(weight.format));
  value.set("written_by", json::Value::string(weight.quant_method));
  json::Value& shape = value.set("shape", json::Value::array());
  for (const std::uint64_t dimension : weight.shape) shape.append(count_json(dimension));
  json::Value& block = value.set("block", json::Value::array());
  for (const std::uint64_t dimension : weight.block) block.append(count_json(dimension));
  value.set("double_quant", json::Value::boolean(weight.double_quant));
  value.set("sorted_columns", json::Value::boolean(!weight.columns.empty()));
  value.set("dtype", json::Value::string(short_name(weight.dtype)));
  value.set("bytes", count_json(weight.size_bytes));
  value.set("bits_per_weight", json::Value::number(weight.bits_per_weight()));
  value.set("readable", json::Value::boolean(weight.is_readable()));
  json::Value& parts = value.set("parts", json::Value::array());
  for (const Part& part : weight.parts) {
    json::Value& item = parts.append(json::Value::object());
    item.set("role", json::Value::string(part.role));
    item.set("tensor", json::Value::string(part.tensor.entry->name));
    item.set("dtype", json::Value::string(name_of(part.tensor.entry->dtype)));
    item.set("file", json::Value::string(part.tensor.file->path().filename().string()));
  }
  return value;
}

json::Value report_json(const Report& report, const Options& options) {
  json::Value value;
  value.set("schema_version", count_json(1));
  value.set("path", json::Value::string(report.path));
  value.set("files", count_json(report.files));
  if (!report.sha256.empty()) value.set("sha256", json::Value::string(report.sha256));
  value.set("total", total_json(report.total));
  json::Value& formats = value.set("by_format", json::Value::object());
  for (const auto& [name, total] : report.by_format) formats.set(name, total_json(total));
  json::Value& layers = value.set("by_layer", json::Value::object());
  for (const std::string& layer : report.layer_order) {
    layers.set(layer, total_json(report.by_layer.at(layer)));
  }
  if (options.no_tensors) return value;
  json::Value& weights = value.set("weights", json::Value::array());
  for (const Weight* weight : report.weights) weights.append(weight_json(*weight));
  return value;
}

std::string hash_of(const Model& model, const Session& session) {
  ThreadPool pool(threads_of(0));
  const auto progress = session.progress("hashing", model.size_bytes());
  const auto parallel = [&](std::size_t count, std::size_t grain, ParallelBody body) {
    pool.parallel_for(count, grain, body);
  };
  return checkpoint_sha256(model.checkpoint, parallel, progress);
}

int inspect(const Options& options, const Session& session) {
  if (is_gguf(options.path)) {
    if (!options.formats.empty()) throw UsageError("--format", "is for safetensors, not for GGUF");
    return inspect_gguf(
        options.path,
        {options.names, options.json, options.markdown, options.no_tensors, options.hash}, session);
  }
  const bool adapter =
      std::filesystem::exists(std::filesystem::path(options.path) / "adapter_config.json") &&
      !std::filesystem::exists(std::filesystem::path(options.path) / "config.json");
  const Model model = open_model(options.path, adapter ? "adapter_model" : "model");
  Report report = make_report(model, options);
  if (options.hash) report.sha256 = hash_of(model, session);
  if (options.json) {
    json::Value value = report_json(report, options);
    if (adapter) value.set("adapter", adapter_json(model));
    std::fputs(json::dump(value).c_str(), stdout);
    return kOk;
  }
  print_text(report, options);
  if (adapter) std::fputs(adapter_text(model, options.markdown).c_str(), stdout);
  const std::string path = shell_word(options.path);
  const bool packed = std::any_of(model.weights.begin(), model.weights.end(),
                                  [](const Weight& weight) { return weight.is_packed(); });
  say_next(session, adapter        ? "monograph merge BASE --adapter " + path + " --out merged"
                    : packed       ? "monograph verify " + path
                    : model.config ? "monograph quantize " + path + " OUT --double-quant"
                                   : "monograph verify " + path);
  return kOk;
}

// Empty for a format that a weight can have, else what is wrong.
std::string known_format(const std::string& format) {
  const std::vector<std::string_view> known = weight_formats();
  if (std::find(known.begin(), known.end(), format) != known.end()) return {};
  std::string text;
  for (const std::string_view name : known) text += (text.empty() ? "" : ", ") + std::string(name);
  return text::in_quotes(format) + " is no format, wanted " + text;
}

Run declare(CommandLine& line) {
  auto options = std::make_shared<Options>();
  line.add_option(
          "path", options->path,
          "A model folder, a PEFT adapter folder, a .safetensors file, an index or a .gguf file")
      .required();
  line.add_option("--name", options->names,
                  "Only weights whose name matches this regex (repeatable)")
      .type_name("REGEX")
      .repeatable();
  line.add_option(
          "--format", options->formats,
          "Only weights of this format (repeatable), as printed: nf4 (also nf4+dq), nf4+dq, "
          "bf16 ...; an unknown one lists all")
      .type_name("FORMAT")
      .repeatable()
      .check(known_format);
  line.add_flag("--no-tensors", options->no_tensors, "Totals only");
  line.add_flag("--hash", options->hash,
                "Also the SHA-256 of all tensors, whatever files they lie in: merge records it");
  const Option markdown = line.add_flag("--markdown", options->markdown, "Print Markdown");
  line.add_flag("--json", options->json, "Print JSON, with every part of every weight")
      .excludes(markdown);
  return [options](Session& session) { return inspect(*options, session); };
}

}  // namespace

const Command kInspect = {
    "inspect",
    "what is inside a checkpoint: formats, shapes, sizes, totals",
    "Print the weights of a checkpoint with the format they are stored in, and totals by format "
    "and "
    "by layer.\n\n"
    "A packed weight is one line, however many tensors it consists of. Recognised: bf16, fp16, "
    "fp32 "
    "and other plain types; nf4 and fp4 of bitsandbytes ('+dq': its scales are quantised too) and "
    "its "
    "int8; fp8 with blocks, rows or one scale; mxfp4, mxfp8 and nvfp4 as DeepSeek, gpt-oss, "
    "compressed-tensors and ModelOpt name them. Of a PEFT adapter also rank, targets and the norm "
    "of "
    "each module's change are printed. Of a GGUF file the key-value pairs and the tensors with "
    "ggml's types are printed.",
    "monograph inspect my-llama\n"
    "monograph inspect my-llama --no-tensors --markdown\n"
    "monograph inspect my-llama --name 'layers\\.0\\.' --format nf4+dq\n"
    "monograph inspect my-adapter --json\n"
    "monograph inspect my-llama-Q4_K_M.gguf --no-tensors",
    declare,
};

}  // namespace monograph::cli
