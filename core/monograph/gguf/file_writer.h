// A GGUF file, version 3, little endian: key-value pairs, the list of tensors, their data at
// multiples of 32 bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/files/atomic_file.h"
#include "monograph/gguf/tensor_type.h"

namespace monograph::gguf {

// Key-value pairs as bytes. A key is added once.
class Metadata {
 public:
  void add(std::string_view key, std::string_view value);
  void add(std::string_view key, const char* value) { add(key, std::string_view(value)); }
  void add(std::string_view key, bool value);
  void add(std::string_view key, std::uint32_t value);
  void add(std::string_view key, float value);
  void add(std::string_view key, std::span<const std::string> values);
  void add(std::string_view key, std::span<const float> values);
  void add(std::string_view key, std::span<const std::int32_t> values);
  // Those of another, behind these.
  void append(const Metadata& other);

  std::uint64_t count() const { return count_; }
  const std::string& bytes() const { return bytes_; }

 private:
  std::uint64_t count_ = 0;
  std::string bytes_;
};

struct TensorInfo {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<std::uint64_t> shape;  // row-major; the last is a multiple of the type's block
  std::uint64_t offset_bytes = 0, size_bytes = 0;  // set by plan_file; from the begin of the data
};

struct FilePlan {
  std::string header;  // up to the data
  std::vector<TensorInfo> tensors;
  std::uint64_t size_bytes = 0;  // of the file
};

// Throws Error if llama.cpp cannot read a name: above 63 bytes, or twice.
FilePlan plan_file(const Metadata& metadata, std::vector<TensorInfo> tensors);

// Appears complete or not at all.
class FileWriter {
 public:
  FileWriter(const std::filesystem::path& target, FilePlan plan,
             std::span<const files::FileId> inputs, files::FileOps& ops = files::system_file_ops());
  // A part of a tensor, by its place in the plan. Thread safe for ranges that do not overlap; what
  // is not written is zero.
  void write(std::size_t tensor, std::uint64_t offset_bytes, std::span<const std::uint8_t> bytes);
  void finish();

 private:
  FilePlan plan_;
  files::AtomicFile file_;
};

}  // namespace monograph::gguf
