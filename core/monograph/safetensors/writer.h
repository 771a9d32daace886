// Writes planned files: the plan declares the tensors, write() streams their bytes in any order and
// from several threads, finish() makes the result appear. Until finish() returns the old state
// stands; a writer that is destroyed before leaves nothing behind.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "monograph/files/atomic_file.h"
#include "monograph/safetensors/plan.h"

namespace monograph::safetensors {

struct WriteOptions {
  std::vector<files::FileId> inputs;  // files that must not be replaced: those the bytes come from
  files::FileOps* ops = &files::system_file_ops();
};

class Writer {
 public:
  // Reserves the space and writes the header into the temporary file.
  Writer(std::filesystem::path target, FilePlan plan, const WriteOptions& options = {});

  const FilePlan& plan() const { return plan_; }
  // Bytes [offset, offset + size) of a tensor. Throws Error on an unknown tensor, a range outside
  // of it or one that was written before. Thread safe.
  void write(std::string_view tensor, std::uint64_t offset_bytes,
             std::span<const std::uint8_t> bytes);
  // After all writes have returned. Throws Error if a byte is missing; then, or on an IoError
  // before the rename, the target is untouched.
  void finish();

 private:
  friend class ShardedWriter;
  using Ranges = std::map<std::uint64_t, std::uint64_t>;  // begin -> end, apart from each other

  void seal();  // every byte was written and is on disk
  void claim(const TensorEntry& entry, std::uint64_t begin, std::uint64_t end);
  [[noreturn]] void fail(std::string_view tensor, const std::string& what) const;

  FilePlan plan_;
  files::AtomicFile file_;
  std::mutex mutex_;  // guards written_ and failed_
  std::map<std::string_view, Ranges> written_;
  bool failed_ = false;
};

// Several files and their index. The index comes last: its rename is the moment the checkpoint
// exists. A folder that already has an index, or a single-file checkpoint of the same stem, is
// refused, for no order of renames could replace several files at once: write to a new folder and
// exchange the folders. Shards without an index, as a killed run leaves them, are replaced.
class ShardedWriter {
 public:
  // `plans` as from plan_shards with the same stem. One plan makes a single file without an index.
  ShardedWriter(const std::filesystem::path& folder, std::vector<FilePlan> plans,
                const WriteOptions& options = {}, std::string_view stem = "model");
  // Removes shards that were renamed before a failure.
  ~ShardedWriter();
  ShardedWriter(const ShardedWriter&) = delete;
  ShardedWriter& operator=(const ShardedWriter&) = delete;

  // As Writer::write; finds the shard.
  void write(std::string_view tensor, std::uint64_t offset_bytes,
             std::span<const std::uint8_t> bytes);
  void finish();

 private:
  files::FileOps& ops_;
  std::string index_text_;
  std::filesystem::path index_path_;
  std::vector<std::unique_ptr<Writer>> shards_;
  std::map<std::string_view, Writer*> shard_of_;
  std::size_t renamed_ = 0;
  bool committed_ = false;
};

}  // namespace monograph::safetensors
