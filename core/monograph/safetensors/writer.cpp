#include "monograph/safetensors/writer.h"

#include <cerrno>
#include <string>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"

namespace monograph::safetensors {
namespace {

using text::in_quotes;

std::span<const std::uint8_t> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

void refuse_existing(const std::filesystem::path& path, files::FileOps& ops) {
  struct stat status {};
  if (ops.stat(path.c_str(), &status) == 0) {
    throw Error(path.string() + ": a checkpoint is already there; write to a new folder");
  }
  if (errno != ENOENT) throw files::IoError(path, "cannot look at it", errno);
}

}  // namespace

Writer::Writer(std::filesystem::path target, FilePlan plan, const WriteOptions& options)
    : plan_(std::move(plan)), file_(std::move(target), options.inputs, *options.ops) {
  for (const TensorEntry& entry : plan_.header.tensors) written_[entry.name];
  file_.allocate(plan_.size_bytes);
  file_.write_at(0, as_bytes(plan_.prefix));
}

void Writer::fail(std::string_view tensor, const std::string& what) const {
  throw Error(file_.target().string() + ": tensor " + in_quotes(tensor) + ": " + what);
}

// Notes the range as written, merged with its neighbours: a tensor streamed by several threads in
// order keeps a handful of ranges, a complete one has exactly one.
void Writer::claim(const TensorEntry& entry, std::uint64_t begin, std::uint64_t end) {
  const std::lock_guard lock(mutex_);
  Ranges& ranges = written_.find(entry.name)->second;
  auto next = ranges.lower_bound(begin);
  const auto before = next == ranges.begin() ? ranges.end() : std::prev(next);
  const bool overlaps = (next != ranges.end() && next->first < end) ||
                        (before != ranges.end() && before->second > begin);
  if (overlaps) {
    fail(entry.name,
         "bytes " + std::to_string(begin) + " to " + std::to_string(end) + " were written before");
  }
  if (next != ranges.end() && next->first == end) {
    end = next->second;
    ranges.erase(next);
  }
  if (before != ranges.end() && before->second == begin) {
    before->second = end;
  } else {
    ranges.emplace(begin, end);
  }
}

void Writer::write(std::string_view tensor, std::uint64_t offset_bytes,
                   std::span<const std::uint8_t> bytes) {
  const TensorEntry* entry = plan_.header.find(tensor);
  if (entry == nullptr) fail(tensor, "was not declared");
  if (offset_bytes > entry->size_bytes || bytes.size() > entry->size_bytes - offset_bytes) {
    fail(tensor, std::to_string(bytes.size()) + " bytes at " + std::to_string(offset_bytes) +
                     " reach past its " + std::to_string(entry->size_bytes));
  }
  if (bytes.empty()) return;
  try {
    claim(*entry, offset_bytes, offset_bytes + bytes.size());
    file_.write_at(entry->offset_bytes + offset_bytes, bytes);
  } catch (...) {
    // The range counts as written and is not: the file can no longer be finished.
    const std::lock_guard lock(mutex_);
    failed_ = true;
    throw;
  }
}

void Writer::seal() {
  const std::lock_guard lock(mutex_);
  if (failed_) throw Error(file_.target().string() + ": an earlier write failed");
  for (const TensorEntry& entry : plan_.header.tensors) {
    const Ranges& ranges = written_.find(entry.name)->second;
    const bool complete =
        entry.size_bytes == 0 || (ranges.size() == 1 && ranges.begin()->first == 0 &&
                                  ranges.begin()->second == entry.size_bytes);
    if (!complete) fail(entry.name, "not all bytes were written");
  }
  file_.sync();
}

void Writer::finish() {
  seal();
  file_.rename_into_place();
  file_.sync_folder();
}

ShardedWriter::ShardedWriter(const std::filesystem::path& folder, std::vector<FilePlan> plans,
                             const WriteOptions& options, std::string_view stem)
    : ops_(*options.ops), index_text_(plans.size() > 1 ? index_text(plans) : std::string()) {
  const std::string single = std::string(stem) + ".safetensors";
  index_path_ = folder / (single + ".index.json");
  refuse_existing(index_path_, ops_);
  if (plans.size() > 1) refuse_existing(folder / single, ops_);
  for (FilePlan& plan : plans) {
    std::filesystem::path target = folder / plan.file_name;
    shards_.push_back(std::make_unique<Writer>(std::move(target), std::move(plan), options));
    Writer* shard = shards_.back().get();
    for (const TensorEntry& entry : shard->plan().header.tensors) shard_of_[entry.name] = shard;
  }
}

ShardedWriter::~ShardedWriter() {
  if (committed_ || shards_.size() == 1) return;
  for (std::size_t i = 0; i < renamed_; ++i) {
    ops_.unlink(shards_[i]->file_.target().c_str());
  }
}

void ShardedWriter::write(std::string_view tensor, std::uint64_t offset_bytes,
                          std::span<const std::uint8_t> bytes) {
  const auto found = shard_of_.find(tensor);
  if (found == shard_of_.end()) {
    throw Error(index_path_.string() + ": tensor " + in_quotes(tensor) + ": was not declared");
  }
  found->second->write(tensor, offset_bytes, bytes);
}

void ShardedWriter::finish() {
  for (const auto& shard : shards_) shard->seal();
  for (const auto& shard : shards_) {
    shard->file_.rename_into_place();
    ++renamed_;
  }
  if (!shards_.empty()) shards_.front()->file_.sync_folder();
  if (shards_.size() <= 1) {
    committed_ = true;
    return;
  }
  files::AtomicFile index(index_path_, {}, ops_);
  index.write_at(0, as_bytes(index_text_));
  index.sync();
  index.rename_into_place();
  committed_ = true;
  index.sync_folder();
}

}  // namespace monograph::safetensors
