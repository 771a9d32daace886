// What a file or a sharded checkpoint will hold, before a byte is written: layout, header text,
// sizes. Pure functions; the same tensors and metadata always give the same bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/safetensors/header.h"
#include "monograph/safetensors/stored_dtype.h"

namespace monograph::safetensors {

struct TensorSpec {
  std::string name;
  StoredDType dtype = StoredDType::kU8;
  std::vector<std::uint64_t> shape;
};

// The bytes of a tensor: product of shape x bits / 8. Throws Error if that overflows or is no whole
// number of bytes.
std::uint64_t size_bytes(const TensorSpec& spec);

struct FilePlan {
  std::string file_name;         // set by plan_shards
  std::string prefix;            // the length, the JSON and its padding to a multiple of 8
  Header header;                 // what a reader of the file will see
  std::uint64_t size_bytes = 0;  // of the whole file
};

// Lays tensors out by dtype, widest first, then by name: every tensor is aligned to its type. The
// prefix is parsed again before it is returned, so a header that our reader would refuse
// (duplicate names, bad UTF-8, too long) throws its Error here and is never written.
FilePlan plan_file(std::vector<TensorSpec> tensors, const Metadata& metadata);

// Fills shards in the given order up to max_shard_bytes of tensors each (one tensor may exceed it).
// Named STEM-00001-of-0000N.safetensors, or STEM.safetensors if there is only one.
std::vector<FilePlan> plan_shards(std::vector<TensorSpec> tensors, const Metadata& metadata,
                                  std::uint64_t max_shard_bytes, std::string_view stem = "model");

// The text of STEM.safetensors.index.json, as transformers writes it.
std::string index_text(std::span<const FilePlan> shards);

}  // namespace monograph::safetensors
