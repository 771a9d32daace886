#include "monograph/safetensors/index.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/safetensors/header.h"
#include "monograph/text/json_scanner.h"
#include "monograph/text/utf8.h"

namespace monograph::safetensors {
namespace {

using text::find_duplicate;
using text::in_quotes;
using text::JsonScanner;

constexpr std::string_view kExtension = ".safetensors";
constexpr int kMaxDepth = 32;
constexpr std::size_t kMaxTopKeys = 1000;

using Pair = std::pair<std::string_view, std::string_view>;

class IndexParser {
 public:
  IndexParser(std::string_view json, std::string_view source)
      : source_(source), scanner_(json, source) {}
  Index parse();

 private:
  void scan();
  void scan_metadata();
  void scan_weight_map();

  std::string_view source_;
  JsonScanner scanner_;
  std::vector<std::string_view> top_keys_;
  std::vector<Pair> weight_map_;
  bool has_weight_map_ = false;
  std::optional<std::uint64_t> total_size_;
};

void IndexParser::scan() {
  scanner_.object([this](std::string_view key) {
    if (top_keys_.size() == kMaxTopKeys) scanner_.fail("more than 1000 keys at the top");
    top_keys_.push_back(key);
    if (key == "weight_map") {
      scan_weight_map();
    } else if (key == "metadata" && scanner_.peek() == '{') {
      scan_metadata();
    } else {
      scanner_.skip_value(kMaxDepth);
    }
  });
  scanner_.expect_end();
}

void IndexParser::scan_metadata() {
  scanner_.object([this](std::string_view key) {
    const char first = scanner_.peek();
    if (key != "total_size" || first < '0' || first > '9') {
      scanner_.skip_value(kMaxDepth);
      return;
    }
    const std::string_view text = scanner_.number();
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc() && end == text.data() + text.size()) total_size_ = value;
  });
}

void IndexParser::scan_weight_map() {
  if (std::exchange(has_weight_map_, true)) scanner_.fail("duplicate key 'weight_map'");
  if (scanner_.peek() != '{') scanner_.fail("weight_map must be an object of file names");
  scanner_.object([this](std::string_view tensor) {
    if (weight_map_.size() == kMaxTensors) {
      scanner_.fail("more than " + std::to_string(kMaxTensors) + " tensors");
    }
    if (scanner_.peek() != '"') {
      scanner_.fail("tensor " + in_quotes(tensor) + ": the file name must be a string");
    }
    weight_map_.emplace_back(tensor, scanner_.string());
  });
}

Index IndexParser::parse() {
  scan();
  const auto fail = [this](const std::string& what) {
    throw Error(std::string(source_) + ": " + what);
  };
  const auto top = [this](std::size_t i) { return top_keys_[i]; };
  if (const auto key = find_duplicate(top_keys_.size(), top)) {
    fail("duplicate key " + in_quotes(*key));
  }
  if (!has_weight_map_) fail("weight_map is missing");
  if (weight_map_.empty()) fail("weight_map names no tensor");
  std::sort(weight_map_.begin(), weight_map_.end());
  const auto same = [](const Pair& a, const Pair& b) { return a.first == b.first; };
  const auto twice = std::adjacent_find(weight_map_.begin(), weight_map_.end(), same);
  if (twice != weight_map_.end()) {
    fail("weight_map: tensor " + in_quotes(twice->first) + " occurs twice");
  }

  Index index;
  index.total_size_bytes = total_size_;
  std::vector<std::string_view> shards;
  shards.reserve(weight_map_.size());
  for (const Pair& pair : weight_map_) shards.push_back(pair.second);
  std::sort(shards.begin(), shards.end());
  shards.erase(std::unique(shards.begin(), shards.end()), shards.end());
  for (const std::string_view shard : shards) check_shard_name(shard, source_);
  index.shards.assign(shards.begin(), shards.end());
  index.tensors.reserve(weight_map_.size());
  for (const auto& [tensor, shard] : weight_map_) {
    const auto found = std::lower_bound(shards.begin(), shards.end(), shard);
    index.tensors.push_back(
        {std::string(tensor), static_cast<std::uint32_t>(found - shards.begin())});
  }
  return index;
}

}  // namespace

void check_shard_name(std::string_view shard, std::string_view source) {
  const auto fail = [&](const std::string& what) {
    throw Error(std::string(source) + ": shard " + in_quotes(shard) + ": " + what);
  };
  for (const char c : shard) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) fail("control character in a file name");
    if (c == '\\') fail("a backslash is a path separator on some systems");
    if (c == ':') fail("a colon makes a drive or a stream on some systems");
  }
  if (shard.starts_with('/')) fail("an absolute path leaves the folder");
  for (std::size_t begin = 0; begin <= shard.size();) {
    const std::size_t end = std::min(shard.find('/', begin), shard.size());
    const std::string_view part = shard.substr(begin, end - begin);
    if (part.empty() || part == ".") fail("an empty or '.' part in the path");
    if (part == "..") fail("'..' leaves the folder");
    begin = end + 1;
  }
  if (!shard.ends_with(kExtension)) fail("the extension must be .safetensors");
  if (shard.size() == kExtension.size() || shard.ends_with("/.safetensors")) {
    fail("the file has no name before its extension");
  }
}

const IndexEntry* Index::find(std::string_view tensor) const {
  const auto found = std::lower_bound(
      tensors.begin(), tensors.end(), tensor,
      [](const IndexEntry& entry, std::string_view wanted) { return entry.tensor < wanted; });
  if (found == tensors.end() || found->tensor != tensor) return nullptr;
  return &*found;
}

Index parse_index(std::string_view json, std::string_view source) {
  if (json.size() > kMaxIndexBytes) {
    throw Error(std::string(source) + ": has " + std::to_string(json.size()) + " bytes, at most " +
                std::to_string(kMaxIndexBytes) + " are allowed");
  }
  return IndexParser(json, source).parse();
}

}  // namespace monograph::safetensors
