// monograph verify: is a checkpoint whole, does it agree with its index and a manifest, are its
// numbers numbers.
#include <cstdio>
#include <memory>

#include "command.h"
#include "convert_folder.h"
#include "gguf_file.h"
#include "manifest.h"
#include "model.h"
#include "next_step.h"
#include "scan.h"
#include "table.h"

namespace monograph::cli {
namespace {

struct Options {
  std::string path, write_manifest, check;
  int jobs = 0;
  bool json = false, no_scan = false;
};

json::Value finding_json(const Finding& finding) {
  json::Value value;
  value.set("weight", json::Value::string(finding.weight));
  value.set("part", json::Value::string(finding.part));
  value.set("what", json::Value::string(finding.what));
  value.set("count", json::Value::number(static_cast<std::int64_t>(finding.count)));
  value.set("first", json::Value::number(static_cast<std::int64_t>(finding.first)));
  return value;
}

void print_findings(const std::vector<Finding>& findings) {
  if (findings.empty()) return;
  Table table({"weight", "part", "what", ">count", ">first"});
  for (const Finding& finding : findings) {
    table.add({printable(finding.weight), std::string(finding.part), std::string(finding.what),
               std::to_string(finding.count), std::to_string(finding.first)});
  }
  std::fputs(table.text().c_str(), stdout);
}

// Throws where a manifest would take the place of anything but an older manifest. Weights, config
// and index are no manifests, so no checked file can be the target.
void check_manifest_target(const std::filesystem::path& target) {
  if (!std::filesystem::exists(target)) return;
  std::string why = "is no file";
  if (std::filesystem::is_regular_file(target)) {
    try {
      read_manifest(target);
      return;
    } catch (const files::IoError&) {
      throw;
    } catch (const Error&) {
      why = "exists and is no manifest";
    }
  }
  throw UsageError("--write-manifest", printable(target.string()) + ": " + why +
                                           "; give a new file or an older manifest");
}

std::string next_of(const Options& options, bool whole) {
  const std::string path = shell_word(options.path);
  if (!whole) return "fetch these files again from where they came, then monograph verify " + path;
  if (!options.write_manifest.empty()) {
    return "check a copy: monograph verify COPY --check " + shell_word(options.write_manifest);
  }
  if (!options.check.empty()) return {};
  return "record its checksums: monograph verify " + path + " --write-manifest manifest.json";
}

int verify(const Options& options, const Session& session) {
  if (is_gguf(options.path)) {
    if (!options.check.empty() || !options.write_manifest.empty()) {
      throw UsageError(options.check.empty() ? "--write-manifest" : "--check",
                       "is for safetensors, not for GGUF");
    }
    return verify_gguf(options.path, options.jobs, !options.no_scan, options.json, session);
  }
  if (!options.write_manifest.empty()) check_manifest_target(options.write_manifest);
  const bool adapter =
      std::filesystem::exists(std::filesystem::path(options.path) / "adapter_config.json") &&
      !std::filesystem::exists(std::filesystem::path(options.path) / "config.json");
  // Header, index and the shape of packed weights: what is wrong there throws.
  const Model model = open_model(options.path, adapter ? "adapter_model" : "model");
  refuse_transforms(model);
  const int threads = threads_of(options.jobs);
  std::vector<Finding> findings;
  if (!options.no_scan) {
    findings = scan(model.weights, threads, session.progress("scan", model.size_bytes()));
  }
  std::vector<std::string> mismatches;
  if (!options.check.empty()) {
    const Manifest wanted = read_manifest(options.check);
    const Manifest found =
        make_manifest(model.checkpoint, threads, session.progress("hash", model.size_bytes()));
    mismatches = compare(wanted, found);
  }
  if (!options.write_manifest.empty()) {
    const Manifest manifest =
        make_manifest(model.checkpoint, threads, session.progress("hash", model.size_bytes()));
    files::write_file(options.write_manifest, manifest_text(manifest));
  }
  if (options.json) {
    json::Value value;
    value.set("schema_version", json::Value::number(std::int64_t{1}));
    value.set("path", json::Value::string(options.path));
    value.set("files",
              json::Value::number(static_cast<std::int64_t>(model.checkpoint.files().size())));
    value.set("tensors",
              json::Value::number(static_cast<std::int64_t>(model.checkpoint.tensors().size())));
    json::Value& list = value.set("findings", json::Value::array());
    for (const Finding& finding : findings) list.append(finding_json(finding));
    json::Value& differing = value.set("mismatches", json::Value::array());
    for (const std::string& text : mismatches) differing.append(json::Value::string(text));
    std::fputs(json::dump(value).c_str(), stdout);
  } else {
    print_findings(findings);
    for (const std::string& text : mismatches) std::printf("%s\n", text.c_str());
    const std::size_t files = model.checkpoint.files().size();
    const char* manifest = options.check.empty() ? ""
                           : mismatches.empty()  ? "; as in the manifest"
                                                 : "; not as in the manifest";
    std::printf("%s: %zu file%s, %zu tensors, %s; %zu finding%s%s\n",
                printable(options.path).c_str(), files, files == 1 ? "" : "s",
                model.checkpoint.tensors().size(), bytes_text(model.size_bytes()).c_str(),
                findings.size(), findings.size() == 1 ? "" : "s", manifest);
    if (!options.write_manifest.empty()) {
      std::printf("wrote %s\n", printable(options.write_manifest).c_str());
    }
    if (const std::string next = next_of(options, findings.empty() && mismatches.empty());
        !next.empty()) {
      say_next(session, next);
    }
  }
  if (!mismatches.empty()) return kMismatch;
  return findings.empty() ? kOk : kFinding;
}

Run declare(CommandLine& line) {
  auto options = std::make_shared<Options>();
  line.add_option("path", options->path,
                  "A model or adapter folder, a .safetensors file, an index or a .gguf file")
      .required();
  line.add_option("--write-manifest", options->write_manifest,
                  "Write the checksum of every tensor to this file: a new one or an older manifest")
      .type_name("FILE");
  line.add_option("--check", options->check,
                  "Compare with a manifest; exit code 4 if a tensor differs, is missing or is new")
      .type_name("FILE");
  line.add_flag("--no-scan", options->no_scan, "Do not look at the numbers");
  declare_jobs(line, options->jobs);
  line.add_flag("--json", options->json, "Print JSON");
  return [options](Session& session) { return verify(*options, session); };
}

}  // namespace

const Command kVerify = {
    "verify",
    "check structure, index, numbers and checksums of a checkpoint",
    "Check that a checkpoint is whole: every rule of the safetensors format, agreement of shards "
    "and "
    "index, the parts of each packed weight. Then look at the numbers: NaN and infinities in "
    "weights "
    "and scales, and scales that are zero where the codes are not (exit code 1). "
    "A GGUF file is held to ggml's rules, and every value is decoded.\n\n"
    "A manifest is JSON with the type, shape and XXH3 checksum (128 bits) of every tensor; it does "
    "not "
    "depend on how the tensors are spread over files. It finds damage, not forgery.",
    "monograph verify my-llama\n"
    "monograph verify my-llama --write-manifest my-llama.manifest.json\n"
    "monograph verify copy-of-my-llama --check my-llama.manifest.json --no-scan",
    declare,
};

}  // namespace monograph::cli
