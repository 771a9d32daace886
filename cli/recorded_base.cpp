#include "recorded_base.h"

#include "convert_folder.h"
#include "monograph/hash/checkpoint_hash.h"

namespace monograph::cli {

std::string hash_of(const safetensors::Checkpoint& checkpoint, const char* label,
                    const Session& session, ParallelFor parallel_for) {
  std::uint64_t total = 0;
  for (const auto& tensor : checkpoint.tensors()) total += tensor.entry->size_bytes;
  const auto progress = session.progress(label, total);
  return checkpoint_sha256(checkpoint, parallel_for, progress);
}

std::string hash_of(const gguf::FileReader& file, const char* label, const Session& session) {
  std::uint64_t total = 0;
  for (const gguf::TensorInfo& tensor : file.header().tensors) total += tensor.size_bytes;
  const auto progress = session.progress(label, total);
  ThreadPool pool(threads_of(0));
  return gguf::file_sha256(
      file,
      [&](std::size_t count, std::size_t grain, ParallelBody body) {
        pool.parallel_for(count, grain, body);
      },
      progress);
}

void declare_another_base(CommandLine& line, bool& another_base) {
  line.add_flag("--another-base", another_base,
                "Take another base than the one that the adapter records");
}

namespace {

constexpr const char* kHashing = "hashing the base";

std::string trained_on(const RecordedBase& recorded, const std::string& sha256) {
  return "was trained on the base with hash " + recorded.sha256 + ", this one has " + sha256;
}

}  // namespace

std::string another_base(const std::filesystem::path& folder,
                         const safetensors::Checkpoint& adapter, const Model& base,
                         const Session& session) {
  const RecordedBase recorded = read_recorded_base(folder, adapter);
  if (recorded.sha256.empty()) return {};
  ThreadPool pool(threads_of(0));
  const std::string sha256 = hash_of(base.checkpoint, kHashing, session,
                                     [&](std::size_t count, std::size_t grain, ParallelBody body) {
                                       pool.parallel_for(count, grain, body);
                                     });
  const json::Value* config = base.config ? &*base.config : nullptr;
  if (is_recorded_base(recorded, base.weights, config, sha256)) return {};
  return trained_on(recorded, sha256);
}

std::string another_base(const std::filesystem::path& folder,
                         const safetensors::Checkpoint& adapter, const gguf::FileReader& base,
                         const Session& session) {
  const RecordedBase recorded = read_recorded_base(folder, adapter);
  if (recorded.sha256.empty()) return {};
  const std::string sha256 = hash_of(base, kHashing, session);
  return recorded.sha256 == sha256 ? std::string() : trained_on(recorded, sha256);
}

}  // namespace monograph::cli
