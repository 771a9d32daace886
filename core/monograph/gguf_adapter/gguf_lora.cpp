#include "monograph/gguf_adapter/gguf_lora.h"

#include <algorithm>
#include <map>
#include <vector>

#include "monograph/gguf/file_writer.h"
#include "monograph/gguf/row_order.h"
#include "monograph/serving/gguf_names.h"
#include "monograph/serving/gguf_tensors.h"

namespace monograph {
namespace {

struct StoredFactor {
  const GgufTensor* tensor;
  bool right;
};

gguf::TensorInfo info_of(const StoredFactor& part, std::uint64_t rank) {
  const ServedPair& pair = *part.tensor->pairs.begin()->second;
  gguf::TensorInfo info;
  info.name = part.tensor->name + (part.right ? ".lora_a" : ".lora_b");
  if (part.tensor->experts != 0) info.shape.push_back(part.tensor->experts);
  if (part.right && part.tensor->embedding) {
    info.shape.insert(info.shape.end(), {pair.inputs, rank});
  } else if (part.right) {
    info.shape.insert(info.shape.end(), {rank, pair.inputs});
  } else {
    info.shape.insert(info.shape.end(), {pair.outputs, rank});
  }
  return info;
}

// The rows in llama.cpp's order.
std::vector<float> permuted(const std::vector<float>& matrix, std::uint64_t rows,
                            std::uint64_t heads) {
  const std::uint64_t cols = matrix.size() / rows;
  std::vector<float> out(matrix.size());
  for (std::uint64_t row = 0; row < rows; ++row) {
    const std::uint64_t from = gguf::source_row(row, rows / heads);
    std::copy_n(matrix.begin() + static_cast<std::ptrdiff_t>(from * cols), cols,
                out.begin() + static_cast<std::ptrdiff_t>(row * cols));
  }
  return out;
}

std::vector<float> values_of(const ServingForm& form, const StoredFactor& part,
                             const ServedPair& pair) {
  if (!part.right) {
    std::vector<float> left = form.left(pair);
    const std::uint64_t heads = part.tensor->permuted_heads;
    return heads == 0 ? left : permuted(left, pair.outputs, heads);
  }
  std::vector<float> right = form.right(pair);
  if (!pair.embedding) return right;
  std::vector<float> out(right.size());
  for (std::uint64_t j = 0; j < form.rank(); ++j) {
    for (std::uint64_t i = 0; i < pair.inputs; ++i) {
      out[i * form.rank() + j] = right[j * pair.inputs + i];
    }
  }
  return out;
}

std::span<const std::uint8_t> as_bytes(const void* data, std::size_t size) {
  return {static_cast<const std::uint8_t*>(data), size};
}

}  // namespace

std::size_t write_gguf_lora(const ServingForm& form, const BaseModules& base,
                            const std::filesystem::path& target, const std::string& name,
                            std::span<const files::FileId> inputs) {
  const std::map<std::string, GgufTensor> tensors = gguf_tensors(form, base);
  std::vector<StoredFactor> parts;
  std::vector<gguf::TensorInfo> infos;
  for (const auto& [tensor_name, tensor] : tensors) {
    for (const bool right : {true, false}) {
      parts.push_back({&tensor, right});
      infos.push_back(info_of(parts.back(), form.rank()));
    }
  }
  gguf::Metadata metadata;
  metadata.add("general.architecture", find_gguf_architecture(base)->name);
  metadata.add("general.type", "adapter");
  metadata.add("general.name", name);
  metadata.add("adapter.type", "lora");
  metadata.add("adapter.lora.alpha", static_cast<float>(form.rank()));
  const gguf::FilePlan plan = gguf::plan_file(metadata, std::move(infos));
  gguf::FileWriter writer(target, plan, inputs);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::uint64_t experts = std::max<std::uint64_t>(parts[i].tensor->experts, 1);
    const std::uint64_t each = plan.tensors[i].size_bytes / experts;
    for (const auto& [expert, pair] : parts[i].tensor->pairs) {
      const std::vector<float> values = values_of(form, parts[i], *pair);
      writer.write(i, expert * each, as_bytes(values.data(), values.size() * sizeof(float)));
    }
  }
  writer.finish();
  return parts.size();
}

}  // namespace monograph
