// Tensors of a GGUF file as weights, for commands that only read elements.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "monograph/gguf/file_reader.h"
#include "monograph/weights/weight.h"

namespace monograph::gguf {

enum class TensorNames : std::uint8_t {
  kOfFile,          // any architecture; rows as they are stored
  kOfTransformers,  // as plan_import has them, and its errors
};

// Sorted by name; the weights keep the file open. `source` is set, `format` is ggml's name.
std::vector<Weight> weights_of(const std::shared_ptr<const FileReader>& file, TensorNames names);

}  // namespace monograph::gguf
