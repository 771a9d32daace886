// The hash of a checkpoint: of its tensors, whatever files they lie in and in what order.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "monograph/base/function_ref.h"
#include "monograph/cpu/parallel.h"
#include "monograph/safetensors/checkpoint.h"

namespace monograph {

// SHA-256 of one line per tensor, sorted by name, each ended by a line feed:
//   NAME DTYPE [D0, D1] SHA256_OF_ITS_BYTES
// with the name as a JSON string and DTYPE as in the header. In Python, for one file:
//   sha256("".join(f"{json.dumps(n, ensure_ascii=False)} {dtype} {shape} {sha256(bytes)}\n" ...))
// `done` is called with the bytes of each tensor, from any thread.
std::string checkpoint_sha256(const safetensors::Checkpoint& checkpoint, ParallelFor parallel_for,
                              FunctionRef<void(std::uint64_t)> done);

struct HashedTensor {
  std::string_view name, dtype;
  std::span<const std::uint64_t> shape;
  std::span<const std::uint8_t> bytes;
};

// The same of any tensors, which the caller has sorted by name.
std::string tensors_sha256(std::span<const HashedTensor> tensors, ParallelFor parallel_for,
                           FunctionRef<void(std::uint64_t)> done);

}  // namespace monograph
