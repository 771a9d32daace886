// Float32 to what ggml stores, of any type that is written.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/gguf/tensor_type.h"

namespace monograph::gguf {

// False for types that are only read: Q4_1, IQ4_NL, IQ4_XS.
bool is_written(TensorType type);

// The largest magnitude that the type holds.
float largest_magnitude(TensorType type);

// `count` elements, whole blocks, finite and up to the largest magnitude; to any alignment. `type`
// is one that is written.
void encode(TensorType type, const float* values, std::size_t count, std::uint8_t* out);

}  // namespace monograph::gguf
