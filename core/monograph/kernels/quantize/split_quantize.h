// Many matrices, one below the other in one input, quantised into one buffer for each usage: the
// packed tensors are views of it, and the buffer is what moves when they are offloaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "monograph/formats/format.h"
#include "monograph/kernels/quantize/quantize.h"

namespace monograph {

// Every part of a packed tensor begins at a multiple of this in its buffer.
inline constexpr std::size_t kPartAlignment = 64;

// Where the parts of one packed tensor lie in the buffer. `tensor_bytes` is 0 in formats without a
// scale for the whole matrix.
struct PackedPlace {
  std::size_t values = 0, values_bytes = 0;
  std::size_t scales = 0, scales_bytes = 0;
  std::size_t tensor = 0, tensor_bytes = 0;
};

struct SplitPlaces {
  std::vector<PackedPlace> places;  // in the order of the splits: values, scales, tensor scale
  std::size_t size_bytes = 0;
};

// Of matrices of splits[i] x cols elements, or, columnwise, of their transposes: cols x splits[i].
// Throws Error that names the split where a row is not whole blocks.
SplitPlaces place_splits(const FormatInfo& info, std::size_t block,
                         std::span<const std::size_t> splits, std::size_t cols, bool columnwise);

struct SplitQuantizeJob {
  const FormatInfo& info;
  DType dtype;
  const void* input;  // sum(splits) x cols elements, contiguous
  std::span<const std::size_t> splits;
  std::size_t cols;
  std::size_t block;
  ScaleRule rule;
  NonFinite nonfinite;
  std::uint8_t* rowwise;     // place_splits(...).size_bytes, or null: not wanted
  std::uint8_t* columnwise;  // the same of the transposes: what quantize() gives for each of them
};

// Bytes between parts become 0, so that equal inputs give equal buffers. Returns the flat index of
// the first non-finite element of a split, if job.nonfinite forbids them; the buffers are then not
// to be used. Holds the transpose of one split at a time.
std::optional<std::size_t> split_quantize(const SplitQuantizeJob& job, ParallelFor parallel_for);

}  // namespace monograph
