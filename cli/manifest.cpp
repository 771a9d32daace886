#define XXH_INLINE_ALL
#include "manifest.h"

#include <xxhash.h>

#include <array>
#include <atomic>
#include <mutex>

#include "model.h"
#include "monograph/base/error.h"
#include "monograph/cpu/parallel.h"
#include "monograph/text/json_document.h"

namespace monograph::cli {
namespace {

using safetensors::LocatedTensor;

constexpr std::string_view kKind = "monograph-manifest-1";

std::string hash(std::span<const std::uint8_t> bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : canonical.digest) {
    text += kHex[byte >> 4];
    text += kHex[byte & 15];
  }
  return text;
}

// XXH3 has no way to join the hashes of pieces, so a tensor is hashed by one thread.
Checksum checksum_of(const LocatedTensor& tensor) {
  return {std::string(name_of(tensor.entry->dtype)), tensor.entry->shape, hash(tensor.bytes())};
}

}  // namespace

Manifest make_manifest(const safetensors::Checkpoint& checkpoint, int threads,
                       const std::function<void(std::uint64_t)>& advance) {
  Manifest manifest;
  const auto& tensors = checkpoint.tensors();
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  ThreadPool pool(threads);
  pool.parallel_for(static_cast<std::size_t>(threads), 1, [&](std::size_t, std::size_t) {
    for (std::size_t i = next++; i < tensors.size(); i = next++) {
      Checksum checksum = checksum_of(tensors[i]);
      advance(tensors[i].entry->size_bytes);
      const std::lock_guard lock(mutex);
      manifest[tensors[i].entry->name] = std::move(checksum);
    }
  });
  return manifest;
}

std::string manifest_text(const Manifest& manifest) {
  json::Value value;
  value.set("kind", json::Value::string(kKind));
  json::Value& tensors = value.set("tensors", json::Value::object());
  for (const auto& [name, checksum] : manifest) {
    json::Value& entry = tensors.append_member(name, json::Value::object());
    entry.set("dtype", json::Value::string(checksum.dtype));
    json::Value& shape = entry.set("shape", json::Value::array());
    for (const std::uint64_t dimension : checksum.shape) {
      shape.append(json::Value::number(static_cast<std::int64_t>(dimension)));
    }
    entry.set("xxh3_128", json::Value::string(checksum.xxh3));
  }
  return json::dump(value);
}

Manifest read_manifest(const std::filesystem::path& path) {
  // A mixture of experts has 10^5 tensors, six values each.
  const json::Value value = read_json(path, {.bytes = 200'000'000, .values = 5'000'000});
  const auto fail = [&](const std::string& what) { throw Error(path.string() + ": " + what); };
  const json::Value* kind = value.find("kind");
  if (kind == nullptr || kind->as_string() != kKind) {
    fail("is no manifest: \"kind\" is not \"" + std::string(kKind) + "\"");
  }
  const json::Value* tensors = value.find("tensors");
  if (tensors == nullptr || !tensors->is(json::Kind::kObject)) fail("tensors must be an object");
  Manifest manifest;
  for (const json::Member& member : tensors->members()) {
    const json::Value* dtype = member.value.find("dtype");
    const json::Value* shape = member.value.find("shape");
    const json::Value* hash = member.value.find("xxh3_128");
    if (!dtype || !dtype->as_string() || !shape || !hash || !hash->as_string()) {
      fail("tensor " + printable(member.key) + ": wanted dtype, shape and xxh3_128");
    }
    Checksum checksum = {dtype->text(), {}, hash->text()};
    for (const json::Value& item : shape->items()) {
      checksum.shape.push_back(item.as_unsigned().value_or(UINT64_MAX));
    }
    manifest[member.key] = std::move(checksum);
  }
  return manifest;
}

std::vector<std::string> compare(const Manifest& wanted, const Manifest& found) {
  std::vector<std::string> lines;
  for (const auto& [name, checksum] : wanted) {
    const auto entry = found.find(name);
    if (entry == found.end()) {
      lines.push_back("missing: " + printable(name));
    } else if (entry->second != checksum) {
      lines.push_back("differs: " + printable(name));
    }
  }
  for (const auto& [name, checksum] : found) {
    if (!wanted.contains(name)) lines.push_back("new: " + printable(name));
  }
  return lines;
}

}  // namespace monograph::cli
