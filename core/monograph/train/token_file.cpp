#include "monograph/train/token_file.h"

#include <charconv>
#include <cstring>

#include "monograph/base/error.h"
#include "monograph/hash/sha256.h"
#include "monograph/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace monograph::train {
namespace {

constexpr std::string_view kFormat = "monograph tokens 1";
// What a token may be is the embedding's to say; this bounds what a label may be.
constexpr std::int32_t kIgnored = static_cast<std::int32_t>(kIgnoredLabel);

std::span<const std::uint8_t> bytes_of(std::span<const std::int32_t> numbers) {
  return {reinterpret_cast<const std::uint8_t*>(numbers.data()), numbers.size_bytes()};
}

}  // namespace

TokenFile::TokenFile(const std::filesystem::path& path)
    : path_(path), file_(safetensors::Checkpoint::open(path)) {
  const auto metadata = [&](const std::string& key) {
    for (const auto& [name, value] : file_.files()[0].header().metadata)
      if (name == key) return value;
    fail("has no " + key + " in its header, wanted a file of monograph preprocess --tokens");
  };
  if (metadata("format") != kFormat)
    fail("format is " + metadata("format") + ", wanted " + std::string(kFormat));
  const std::string pad = metadata("pad_token_id");
  const auto [end, wrong] = std::from_chars(pad.data(), pad.data() + pad.size(), pad_token_);
  if (wrong != std::errc() || end != pad.data() + pad.size() || pad_token_ < 0)
    fail("pad_token_id is " + pad + ", wanted a number, 0 or more");
  const auto object = [&](const std::string& key) {
    json::Value value = json::parse(metadata(key), path_.string() + ": " + key);
    if (!value.is(json::Kind::kObject)) fail(key + " in its header is no JSON object");
    return value;
  };
  recipe_ = object("recipe");
  tokenizer_ = object("tokenizer");
  const json::Value* const more = tokenizer_.find("new_tokens");
  const std::uint64_t new_tokens = more == nullptr ? 0 : more->as_unsigned().value_or(1);
  if (new_tokens > 0)
    fail("has " + std::to_string(new_tokens) +
         " tokens that are new to the model, whose rows the native trainer would not train; run "
         "monograph train");
  ids_ = numbers("input_ids");
  labels_ = numbers("labels");
  const safetensors::LocatedTensor* const offsets = file_.find("offsets");
  if (offsets == nullptr || offsets->entry->dtype != safetensors::StoredDType::kI64 ||
      offsets->entry->shape.size() != 1)
    fail("has no offsets, wanted int64 in one dimension");
  offsets_.resize(offsets->entry->shape[0]);
  std::memcpy(offsets_.data(), offsets->bytes().data(), offsets_.size() * sizeof(std::int64_t));
  check_documents();
  sha256_ = hash();
  if (const std::string wanted = metadata("tokens_sha256"); wanted != sha256_)
    fail("tokens have the hash " + sha256_.substr(0, 12) + ", wanted " + wanted.substr(0, 12) +
         ": the file is not as it was written");
}

void TokenFile::fail(const std::string& what) const { throw Error(path_.string() + ": " + what); }

std::span<const std::int32_t> TokenFile::numbers(const char* name) const {
  const safetensors::LocatedTensor* const tensor = file_.find(name);
  if (tensor == nullptr || tensor->entry->dtype != safetensors::StoredDType::kI32 ||
      tensor->entry->shape.size() != 1)
    fail(std::string("has no ") + name + ", wanted int32 in one dimension");
  const std::uint8_t* const data = tensor->bytes().data();
  if (reinterpret_cast<std::uintptr_t>(data) % alignof(std::int32_t) != 0)
    fail(std::string(name) + " does not begin at a multiple of 4 bytes");
  return {reinterpret_cast<const std::int32_t*>(data), tensor->entry->shape[0]};
}

void TokenFile::check_documents() const {
  if (labels_.size() != ids_.size())
    fail("has " + std::to_string(ids_.size()) + " input_ids and " + std::to_string(labels_.size()) +
         " labels, wanted one each");
  if (offsets_.size() < 2 || offsets_.front() != 0 ||
      offsets_.back() != static_cast<std::int64_t>(ids_.size()))
    fail("offsets do not go from 0 to the " + std::to_string(ids_.size()) + " tokens");
  for (std::size_t i = 1; i < offsets_.size(); ++i)
    if (offsets_[i] <= offsets_[i - 1])
      fail("document " + std::to_string(i - 1) + " ends at token " + std::to_string(offsets_[i]) +
           ", wanted one behind its first, " + std::to_string(offsets_[i - 1]));
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    if (ids_[i] < 0) fail("token " + std::to_string(i) + " is " + std::to_string(ids_[i]));
    if (labels_[i] != ids_[i] && labels_[i] != kIgnored)
      fail("label " + std::to_string(i) + " is " + std::to_string(labels_[i]) + ", wanted " +
           std::to_string(ids_[i]) + ", its token, or -100");
  }
}

std::string TokenFile::hash() const {
  Sha256 hash;
  for (std::size_t i = 0; i < size(); ++i) {
    const Document document = (*this)[i];
    const std::int32_t length[] = {static_cast<std::int32_t>(document.ids.size())};
    hash.add(bytes_of(length));
    hash.add(bytes_of(document.ids));
    hash.add(bytes_of(document.labels));
  }
  return hash.hex();
}

Document TokenFile::operator[](std::size_t number) const {
  const auto begin = static_cast<std::size_t>(offsets_[number]);
  const auto count = static_cast<std::size_t>(offsets_[number + 1]) - begin;
  return {ids_.subspan(begin, count), labels_.subspan(begin, count)};
}

std::vector<std::int64_t> TokenFile::lengths() const {
  std::vector<std::int64_t> found;
  for (std::size_t i = 0; i < size(); ++i) found.push_back(offsets_[i + 1] - offsets_[i]);
  return found;
}

}  // namespace monograph::train
