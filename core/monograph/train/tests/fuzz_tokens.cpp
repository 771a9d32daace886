// libFuzzer: a token file and what is planned from it. The input is six bytes of settings, the text
// of a safetensors header, the byte 0x1e, and the data behind the header. Where the header has a
// place for it, tokens_sha256 is made the one of the data, so that what is behind the hash is
// reached. A file is refused by Error, or its documents come once an epoch and unchanged.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/hash/sha256.h"
#include "monograph/safetensors/header.h"
#include "monograph/train/batch.h"
#include "monograph/train/row_order.h"
#include "monograph/train/token_file.h"

namespace {

using namespace monograph;
namespace fs = std::filesystem;

constexpr char kBetween = 0x1e;  // a control character, which no JSON text has
constexpr std::size_t kSettings = 6, kHexDigits = 64;

void require(bool condition) {
  if (!condition) std::abort();
}

// In memory, and gone with the process.
class File {
 public:
  File() : path_("/dev/shm/monograph-fuzz-tokens-" + std::to_string(getpid()) + ".safetensors") {}
  ~File() { fs::remove(path_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const fs::path& path() const { return path_; }
  void write(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }

 private:
  fs::path path_;
};

std::string file_of(std::string_view header, std::string_view data) {
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return bytes.append(header).append(data);
}

// The hash that monograph preprocess writes: of each document its length, tokens and labels. Empty
// if the tensors are not there or documents leave them.
std::string hash_of(const std::string& file) {
  std::string_view ids, labels, offsets;
  try {
    const std::span<const std::uint8_t> bytes(reinterpret_cast<const std::uint8_t*>(file.data()),
                                              file.size());
    const auto header = safetensors::parse_header(bytes, file.size(), "fuzz");
    for (const safetensors::TensorEntry& entry : header.tensors) {
      const std::string_view own =
          std::string_view(file).substr(entry.offset_bytes, entry.size_bytes);
      if (entry.name == "input_ids") ids = own;
      if (entry.name == "labels") labels = own;
      if (entry.name == "offsets") offsets = own;
    }
  } catch (const Error&) {
    return "";
  }
  Sha256 hash;
  for (std::size_t i = 0; i + 16 <= offsets.size(); i += 8) {
    std::uint64_t ends[2];
    std::memcpy(ends, offsets.data() + i, sizeof ends);
    const std::size_t most = std::min(ids.size(), labels.size()) / 4;
    if (ends[0] > ends[1] || ends[1] > most) return "";
    const auto length = static_cast<std::int32_t>(ends[1] - ends[0]);
    char word[4];
    std::memcpy(word, &length, sizeof word);
    hash.add(std::string_view(word, sizeof word));
    for (const std::string_view& tensor : {ids, labels})
      hash.add(tensor.substr(4 * ends[0], 4 * (ends[1] - ends[0])));
  }
  return hash.hex();
}

void with_right_hash(std::string& file, std::size_t header_size) {
  constexpr std::string_view kKey = "\"tokens_sha256\":\"";
  const std::size_t key = file.find(kKey, 8);
  const std::size_t digits = key + kKey.size();
  if (key == std::string::npos || digits + kHexDigits > 8 + header_size) return;
  const std::string hash = hash_of(file);
  if (!hash.empty() && file[digits + kHexDigits] == '"') file.replace(digits, kHexDigits, hash);
}

void check_batch(const train::Batch& batch, std::span<const train::Document> documents,
                 std::int64_t pad, std::size_t multiple) {
  require(batch.length % multiple == 0 && batch.ids.size() == batch.tokens());
  require(batch.targets.size() == batch.tokens() && batch.positions.size() == batch.length);
  require(std::is_sorted(batch.offsets.begin(), batch.offsets.end()));
  require(batch.offsets.front() == 0 &&
          static_cast<std::size_t>(batch.offsets.back()) <= batch.tokens());
  const bool packed = batch.key_lengths.empty();
  std::size_t targets = 0, begin = 0, number = 0;
  for (const train::Document& document : documents) {
    if (!packed) begin = number++ * batch.length;
    for (std::size_t i = 0; i < document.ids.size(); ++i) {
      require(batch.ids[begin + i] == document.ids[i]);
      require(batch.positions[begin % batch.length + i] == static_cast<std::int64_t>(i));
      if (i > 0) require(batch.targets[begin + i - 1] == document.labels[i]);
      if (i > 0 && document.labels[i] >= 0) ++targets;
    }
    begin += document.ids.size();
  }
  require(batch.count_targets() == targets);
  if (packed)
    for (std::size_t i = begin; i < batch.tokens(); ++i) require(batch.ids[i] == pad);
}

void plan(const train::TokenFile& tokens, std::string_view given) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(given[i]); };
  train::RowOrderSettings settings;
  settings.capacity = 1 + byte(0) + 256 * (byte(1) % 4);
  settings.rows_per_batch = 1 + byte(2) % 3;
  settings.batches_per_step = 1 + byte(3) % 5;
  settings.seed = byte(4);
  settings.shuffle = (byte(5) & 1) != 0;
  const bool packs = (byte(5) & 2) != 0;
  const std::vector<std::int64_t> lengths = tokens.lengths();
  if (packs) settings.max_documents = train::documents_of_a_row(lengths, settings.capacity);
  const auto length = static_cast<std::size_t>(settings.capacity);
  train::RowOrder order(lengths, settings);
  for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
    std::vector<std::size_t> seen(tokens.size());
    for (std::size_t step = 0; step < order.steps(epoch); ++step) {
      const auto batches = order.step(epoch, step);
      require(!batches.empty() && batches.size() <= settings.batches_per_step);
      for (const std::vector<std::size_t>& numbers : batches) {
        std::vector<train::Document> documents;
        for (const std::size_t number : numbers) {
          ++seen[number];
          documents.push_back(tokens[number]);
        }
        const std::size_t rows = settings.rows_per_batch,
                          multiple = (byte(5) & 4) != 0 ? length : 8;
        if (packs)
          check_batch(train::packed_batch(documents, length * rows, tokens.pad_token()), documents,
                      tokens.pad_token(), length * rows);
        else
          check_batch(train::padded_batch(documents, rows, multiple, tokens.pad_token()), documents,
                      tokens.pad_token(), multiple);
      }
    }
    require(std::all_of(seen.begin(), seen.end(), [](std::size_t times) { return times == 1; }));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const File file;
  const std::string_view given(reinterpret_cast<const char*>(data), size);
  if (size < kSettings) return 0;
  const std::string_view rest = given.substr(kSettings);
  const std::size_t end = std::min(rest.find(kBetween), rest.size());
  std::string bytes = file_of(rest.substr(0, end), rest.substr(std::min(end + 1, rest.size())));
  with_right_hash(bytes, end);
  file.write(bytes);
  try {
    const train::TokenFile tokens(file.path());
    require(tokens.size() >= 1 && tokens.pad_token() >= 0);
    require(tokens.recipe().is(json::Kind::kObject) && tokens.tokenizer().is(json::Kind::kObject));
    plan(tokens, given);
  } catch (const Error&) {
  }
  return 0;
}
