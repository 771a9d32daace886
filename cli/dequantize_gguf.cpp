#include <array>
#include <chrono>
#include <cstdio>

#include "gguf_file.h"
#include "monograph/files/staged_folder.h"
#include "monograph/gguf/import.h"
#include "next_step.h"

namespace monograph::cli {
namespace {

namespace fs = std::filesystem;

void write_folder(const gguf::FileReader& file, const gguf::ImportPlan& plan, DType dtype,
                  std::vector<safetensors::FilePlan> files, const FolderOptions& options,
                  const Session& session) {
  const std::array<fs::path, 0> no_folder = {};
  files::StagedFolder folder(
      options.to, options.force ? files::Existing::kReplace : files::Existing::kRefuse, no_folder);
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
  throw_if_interrupted();
  folder.commit();
}

}  // namespace

int dequantize_gguf(const FolderOptions& options, DType dtype, const Session& session) {
  if (options.to.empty()) throw UsageError("to", "is empty, wanted a folder");
  const gguf::FileReader file(options.from);
  const gguf::ImportPlan plan = gguf::plan_import(file);
  std::vector<safetensors::FilePlan> files = safetensors::plan_shards(
      gguf::specs_of(plan, dtype), {{"format", "pt"}}, options.max_shard_bytes);
  const std::size_t count = files.size();
  std::uint64_t bytes = 0;
  for (const safetensors::FilePlan& one : files) bytes += one.size_bytes;
  const auto start = std::chrono::steady_clock::now();
  if (!options.dry_run) {
    write_folder(file, plan, dtype, std::move(files), options, session);
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
  std::printf(
      "a GGUF file has no config.json and no tokenizer.json: copy them from the model that "
      "it was made of\n");
  if (!options.dry_run) {
    say_next(session, "monograph inspect " + shell_word(options.to));
  }
  return kOk;
}

}  // namespace monograph::cli
