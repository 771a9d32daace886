// From one checkpoint to another, weight by weight and piece by piece: copied, quantised, or
// decoded and cast. Memory does not grow with the checkpoint: the source is mapped, a thread holds
// one piece and the scales of the weights in work.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "monograph/quant_methods/conversion.h"
#include "monograph/safetensors/plan.h"
#include "monograph/safetensors/writer.h"

namespace monograph {

// The tensors that a conversion writes: the values first.
std::vector<safetensors::TensorSpec> specs_of(const Conversion& conversion);

// In the order of the source's bytes, so that reading is sequential.
void sort_by_source(std::vector<Conversion>& conversions);

// The bytes of the source that convert() reports to `advance` for it.
std::uint64_t source_bytes(const Conversion& conversion);

struct ConvertOptions {
  int threads = 1;
  // Called with the bytes of the source of each piece done, from any thread; what it throws ends
  // the work.
  std::function<void(std::uint64_t)> advance = [](std::uint64_t) {};
};

// Writes every tensor of specs_of; the caller planned the files and finishes the writer. Throws
// Error if a value cannot be stored: a NaN or infinity under NonFinite::kError, or a cast to fp16
// that overflows. The same bytes for any number of threads.
void convert(std::span<const Conversion> conversions, safetensors::ShardedWriter& writer,
             const ConvertOptions& options);

}  // namespace monograph
