#include <array>
#include <chrono>
#include <cstdio>

#include "gguf_file.h"
#include "monograph/base/error.h"
#include "monograph/files/atomic_file.h"
#include "monograph/files/staged_folder.h"
#include "monograph/gguf/import.h"
#include "monograph/gguf/import_config.h"
#include "monograph/gguf/import_tokenizer.h"
#include "next_step.h"

namespace monograph::cli {
namespace {

namespace fs = std::filesystem;

// What stands beside the weights in a folder of transformers, or why it does not.
struct Sidecars {
  std::vector<std::pair<std::string, std::string>> files;  // name and content
  std::vector<std::string> missing;
};

Sidecars sidecars_of(const gguf::FileReader& file, DType dtype) {
  Sidecars sidecars;
  try {
    sidecars.files.emplace_back("config.json", json::dump(gguf::import_config(file, dtype)));
  } catch (const Error& error) {
    sidecars.missing.push_back(std::string("config.json: ") + error.what());
  }
  try {
    const gguf::ImportedTokenizer found =
        gguf::import_tokenizer(file.header(), file.path().string());
    sidecars.files.emplace_back("tokenizer.json", json::dump(found.tokenizer));
    sidecars.files.emplace_back("tokenizer_config.json", json::dump(found.config));
    if (found.generation) {
      sidecars.files.emplace_back("generation_config.json", json::dump(*found.generation));
    }
  } catch (const Error& error) {
    sidecars.missing.push_back(std::string("tokenizer.json: ") + error.what());
  }
  return sidecars;
}

void write_folder(const gguf::FileReader& file, const gguf::ImportPlan& plan,
                  const Sidecars& sidecars, DType dtype, std::vector<safetensors::FilePlan> files,
                  const FolderOptions& options, const Session& session) {
  const std::array<fs::path, 0> no_folder = {};
  files::StagedFolder folder(options.to, existing_of(options), no_folder);
  safetensors::WriteOptions write;
  write.inputs = {file.id()};
  safetensors::ShardedWriter writer(folder.path(), std::move(files), write);
  std::uint64_t total = 0;
  for (const gguf::TensorInfo& tensor : file.header().tensors) total += tensor.size_bytes;
  {
    gguf::ImportOptions work;
    work.threads = threads_of(options.jobs);
    work.advance = session.progress("dequantize", total);
    gguf::write_import(plan, file, dtype, writer, work);
  }
  session.note("writing to disk ...");
  writer.finish();
  for (const auto& [name, content] : sidecars.files) {
    files::write_file(folder.path() / name, content);
  }
  throw_if_interrupted();
  folder.commit();
}

}  // namespace

void say_next_of_gguf(const gguf::FileReader& file, const Session& session) {
  try {
    gguf::plan_import(file);
  } catch (const Error&) {
    return;
  }
  say_next(session, "monograph dequantize " + shell_word(file.path().string()) + " OUT");
}

int dequantize_gguf(const FolderOptions& options, DType dtype, const Session& session) {
  if (options.to.empty()) throw UsageError("to", "is empty, wanted a folder");
  const gguf::FileReader file(options.from);
  const bool in_turns = file.header().architecture() == "gpt-oss";
  const gguf::ImportPlan plan = in_turns ? gguf::with_stacks_in_turns(file, gguf::plan_import(file))
                                         : gguf::plan_import(file);
  std::vector<safetensors::FilePlan> files = safetensors::plan_shards(
      gguf::specs_of(plan, dtype), {{"format", "pt"}}, options.max_shard_bytes);
  const Sidecars sidecars = sidecars_of(file, dtype);
  const std::size_t count = files.size();
  std::uint64_t bytes = 0;
  for (const safetensors::FilePlan& one : files) bytes += one.size_bytes;
  const auto start = std::chrono::steady_clock::now();
  if (options.dry_run) {
    files::StagedFolder::check_target(options.to, existing_of(options), {});
  } else {
    write_folder(file, plan, sidecars, dtype, std::move(files), options, session);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (options.json) {
    const auto number = [](std::uint64_t n) {
      return json::Value::number(static_cast<std::int64_t>(n));
    };
    json::Value value;
    value.set("schema_version", number(1));
    value.set("output", json::Value::string(options.to));
    value.set("dry_run", json::Value::boolean(options.dry_run));
    value.set("files", number(count));
    value.set("tensors", number(plan.tensors.size()));
    value.set("bytes", number(bytes));
    value.set("seconds", json::Value::number(seconds));
    json::Value& left = value.set("left_out", json::Value::array());
    for (const std::string& name : plan.left_out) left.append(json::Value::string(name));
    json::Value& missing = value.set("missing", json::Value::array());
    for (const std::string& why : sidecars.missing) missing.append(json::Value::string(why));
    std::fputs(json::dump(value).c_str(), stdout);
    return kOk;
  }
  std::printf("%s %zu tensors, %s in %zu file%s to %s\n", options.dry_run ? "would write" : "wrote",
              plan.tensors.size(), bytes_text(bytes).c_str(), count, count == 1 ? "" : "s",
              printable(options.to).c_str());
  for (const std::string& name : plan.left_out) {
    std::printf("left out: %s, which config.json states as rope_scaling\n",
                printable(name).c_str());
  }
  for (const std::string& why : sidecars.missing) {
    std::printf("not written: %s; copy it from the model that the file was made of\n", why.c_str());
  }
  if (!options.dry_run) {
    say_next(session, "monograph inspect " + shell_word(options.to));
  }
  return kOk;
}

}  // namespace monograph::cli
