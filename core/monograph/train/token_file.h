// Documents as tokens and labels in one mapped file, as `monograph preprocess --tokens` writes it:
//   input_ids, labels  int32 [tokens], documents one behind the other; label -100: no target
//   offsets            int64 [documents + 1], where each begins; then the end of the last
// and in the header `format`, `pad_token_id`, `tokens_sha256`, and two JSON objects: `recipe`, the
// keys that decide which documents there are and what their tokens are, and `tokenizer`, the hashes
// of the files it was read from. A file without these two is refused.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "monograph/safetensors/checkpoint.h"
#include "monograph/text/json_document.h"
#include "monograph/train/batch.h"

namespace monograph::train {

class TokenFile {
 public:
  // Throws Error for a file that breaks these rules, or whose tokens are not those of its hash.
  explicit TokenFile(const std::filesystem::path& path);

  std::size_t size() const { return offsets_.size() - 1; }
  Document operator[](std::size_t number) const;
  std::vector<std::int64_t> lengths() const;
  std::int64_t pad_token() const { return pad_token_; }
  const std::string& sha256() const { return sha256_; }
  const json::Value& recipe() const { return recipe_; }
  const json::Value& tokenizer() const { return tokenizer_; }
  std::string name() const { return path_.string(); }

 private:
  [[noreturn]] void fail(const std::string& what) const;
  std::span<const std::int32_t> numbers(const char* name) const;
  void check_documents() const;
  std::string hash() const;

  std::filesystem::path path_;
  safetensors::Checkpoint file_;
  std::span<const std::int32_t> ids_, labels_;
  std::vector<std::int64_t> offsets_;
  std::int64_t pad_token_ = 0;
  std::string sha256_;
  json::Value recipe_, tokenizer_;
};

}  // namespace monograph::train
