#include "monograph/gguf/file_writer.h"

#include <cstring>
#include <set>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

constexpr std::uint32_t kVersion = 3;
constexpr std::uint64_t kAlignment = 32;
constexpr std::size_t kMaxTensorName = 63;

// The types of values, by their numbers in files.
enum ValueType : std::uint32_t {
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
};

std::uint64_t aligned(std::uint64_t offset) {
  return (offset + kAlignment - 1) / kAlignment * kAlignment;
}

template <class T>
void append_number(std::string& out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

void append_string(std::string& out, std::string_view text) {
  append_number(out, std::uint64_t{text.size()});
  out.append(text);
}

void append_key(std::string& out, std::string_view key, std::uint32_t type) {
  append_string(out, key);
  append_number(out, type);
}

void append_array(std::string& out, std::string_view key, std::uint32_t type, std::uint64_t count) {
  append_key(out, key, kArray);
  append_number(out, type);
  append_number(out, count);
}

std::span<const std::uint8_t> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

}  // namespace

void Metadata::add(std::string_view key, std::string_view value) {
  append_key(bytes_, key, kString);
  append_string(bytes_, value);
  ++count_;
}

void Metadata::add(std::string_view key, bool value) {
  append_key(bytes_, key, kBool);
  append_number(bytes_, static_cast<std::uint8_t>(value));
  ++count_;
}

void Metadata::add(std::string_view key, std::uint32_t value) {
  append_key(bytes_, key, kUint32);
  append_number(bytes_, value);
  ++count_;
}

void Metadata::add(std::string_view key, float value) {
  append_key(bytes_, key, kFloat32);
  append_number(bytes_, value);
  ++count_;
}

void Metadata::add(std::string_view key, std::span<const std::string> values) {
  append_array(bytes_, key, kString, values.size());
  for (const std::string& value : values) append_string(bytes_, value);
  ++count_;
}

void Metadata::add(std::string_view key, std::span<const float> values) {
  append_array(bytes_, key, kFloat32, values.size());
  for (const float value : values) append_number(bytes_, value);
  ++count_;
}

void Metadata::add(std::string_view key, std::span<const std::int32_t> values) {
  append_array(bytes_, key, kInt32, values.size());
  for (const std::int32_t value : values) append_number(bytes_, value);
  ++count_;
}

void Metadata::append(const Metadata& other) {
  bytes_ += other.bytes_;
  count_ += other.count_;
}

FilePlan plan_file(const Metadata& metadata, std::vector<TensorInfo> tensors) {
  FilePlan plan;
  plan.header = "GGUF";
  append_number(plan.header, kVersion);
  append_number(plan.header, std::uint64_t{tensors.size()});
  append_number(plan.header, metadata.count());
  plan.header += metadata.bytes();
  std::set<std::string_view> names;
  std::uint64_t end = 0;
  for (TensorInfo& tensor : tensors) {
    if (tensor.name.size() > kMaxTensorName) {
      throw Error("tensor " + text::in_quotes(tensor.name) +
                  ": its name is too long for llama.cpp");
    }
    if (!names.insert(tensor.name).second) {
      throw Error("tensor " + text::in_quotes(tensor.name) + ": would be written twice");
    }
    std::uint64_t elements = 1;
    for (const std::uint64_t size : tensor.shape) elements *= size;
    if (tensor.shape.empty() || tensor.shape.back() % info_of(tensor.type).block_elements != 0) {
      throw Error("tensor " + text::in_quotes(tensor.name) + ": its rows are not whole blocks of " +
                  std::to_string(info_of(tensor.type).block_elements));
    }
    tensor.offset_bytes = end;
    tensor.size_bytes = size_bytes(tensor.type, elements);
    end = aligned(end + tensor.size_bytes);
    append_string(plan.header, tensor.name);
    append_number(plan.header, static_cast<std::uint32_t>(tensor.shape.size()));
    for (auto size = tensor.shape.rbegin(); size != tensor.shape.rend(); ++size) {
      append_number(plan.header, *size);
    }
    append_number(plan.header, static_cast<std::uint32_t>(tensor.type));
    append_number(plan.header, tensor.offset_bytes);
  }
  plan.header.resize(aligned(plan.header.size()));
  plan.size_bytes = plan.header.size() + end;
  plan.tensors = std::move(tensors);
  return plan;
}

FileWriter::FileWriter(const std::filesystem::path& target, FilePlan plan,
                       std::span<const files::FileId> inputs, files::FileOps& ops)
    : plan_(std::move(plan)), file_(target, inputs, ops) {
  file_.allocate(plan_.size_bytes);
  file_.write_at(0, as_bytes(plan_.header));
  // The last byte, where the space could not be reserved; before it holes are zeros.
  const std::uint8_t zero = 0;
  if (plan_.size_bytes > plan_.header.size()) file_.write_at(plan_.size_bytes - 1, {&zero, 1});
}

void FileWriter::write(std::size_t tensor, std::uint64_t offset_bytes,
                       std::span<const std::uint8_t> bytes) {
  const TensorInfo& info = plan_.tensors.at(tensor);
  if (offset_bytes > info.size_bytes || bytes.size() > info.size_bytes - offset_bytes) {
    throw Error(file_.target().string() + ": tensor " + text::in_quotes(info.name) + ": " +
                std::to_string(bytes.size()) + " bytes at " + std::to_string(offset_bytes) +
                " reach past its " + std::to_string(info.size_bytes));
  }
  file_.write_at(plan_.header.size() + info.offset_bytes + offset_bytes, bytes);
}

void FileWriter::finish() {
  file_.sync();
  file_.rename_into_place();
  file_.sync_folder();
}

}  // namespace monograph::gguf
