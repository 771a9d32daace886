#include "monograph/safetensors/checkpoint.h"

#include <algorithm>
#include <string>
#include <system_error>

#include "monograph/base/error.h"
#include "monograph/files/inside_folder.h"
#include "monograph/files/mapped_file.h"
#include "monograph/safetensors/index.h"
#include "monograph/text/utf8.h"

namespace monograph::safetensors {
namespace {

using text::in_quotes;

namespace fs = std::filesystem;

// Each tensor of the shard is one that the index places there, and their number is right: then the
// two sets are equal.
void check_shard(const Index& index, std::uint32_t shard, const Reader& file,
                 std::size_t expected_tensors, const std::string& source) {
  const std::string& name = index.shards[shard];
  for (const TensorEntry& entry : file.header().tensors) {
    const IndexEntry* placed = index.find(entry.name);
    if (placed == nullptr) {
      throw Error(source + ": tensor " + in_quotes(entry.name) + " of shard " + in_quotes(name) +
                  " is not in the index");
    }
    if (placed->shard != shard) {
      throw Error(source + ": tensor " + in_quotes(entry.name) + " is in shard " + in_quotes(name) +
                  ", the index says " + in_quotes(index.shards[placed->shard]));
    }
  }
  if (file.header().tensors.size() == expected_tensors) return;
  for (const IndexEntry& entry : index.tensors) {
    if (entry.shard == shard && file.find(entry.tensor) == nullptr) {
      throw Error(source + ": tensor " + in_quotes(entry.tensor) + " is not in shard " +
                  in_quotes(name) + ", where the index says it is");
    }
  }
}

}  // namespace

Checkpoint Checkpoint::open(const fs::path& path, std::string_view stem) {
  Checkpoint checkpoint;
  fs::path file = path;
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    const fs::path single = path / (std::string(stem) + ".safetensors");
    const fs::path index = path / (std::string(stem) + ".safetensors.index.json");
    const bool has_single = fs::exists(single, ignored), has_index = fs::exists(index, ignored);
    if (has_single && has_index) {
      throw Error(path.string() + ": holds both " + single.filename().string() + " and " +
                  index.filename().string() + "; name the one to read");
    }
    file = has_index ? index : single;
  }
  if (file.extension() == ".json") {
    checkpoint.open_index(file);
  } else {
    checkpoint.files_.emplace_back(file);
  }
  checkpoint.list_tensors();
  return checkpoint;
}

void Checkpoint::open_index(const fs::path& path) {
  const std::string source = path.string();
  const Index index = parse_index(files::MappedFile(path, kMaxIndexBytes).text(), source);
  std::vector<std::size_t> expected(index.shards.size());
  for (const IndexEntry& entry : index.tensors) ++expected[entry.shard];
  const fs::path parent = path.parent_path();
  const fs::path folder = fs::canonical(parent.empty() ? fs::path(".") : parent);
  files_.reserve(index.shards.size());
  for (std::size_t i = 0; i < index.shards.size(); ++i) {
    const fs::path resolved = files::resolve_inside(
        folder, index.shards[i], source + ": shard " + in_quotes(index.shards[i]));
    const Reader& file = files_.emplace_back(resolved, parent / index.shards[i]);
    check_shard(index, static_cast<std::uint32_t>(i), file, expected[i], source);
  }
}

void Checkpoint::list_tensors() {
  for (const Reader& file : files_) {
    for (const TensorEntry& entry : file.header().tensors) tensors_.push_back({&file, &entry});
  }
  std::sort(tensors_.begin(), tensors_.end(), [](const LocatedTensor& a, const LocatedTensor& b) {
    return a.entry->name < b.entry->name;
  });
}

const LocatedTensor* Checkpoint::find(std::string_view name) const {
  const auto found = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                      [](const LocatedTensor& tensor, std::string_view wanted) {
                                        return tensor.entry->name < wanted;
                                      });
  if (found == tensors_.end() || found->entry->name != name) return nullptr;
  return &*found;
}

std::vector<files::FileId> Checkpoint::ids() const {
  std::vector<files::FileId> ids;
  ids.reserve(files_.size());
  for (const Reader& file : files_) ids.push_back(file.id());
  return ids;
}

}  // namespace monograph::safetensors
