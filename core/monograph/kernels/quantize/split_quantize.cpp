#include "monograph/kernels/quantize/split_quantize.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/formats/bind.h"

namespace monograph {
namespace {

constexpr std::size_t kTile = 32;  // of a transpose: 32 rows of 32 bf16 are in the L1 cache

std::size_t aligned(std::size_t size) { return ceil_div(size, kPartAlignment) * kPartAlignment; }

template <class T>
void transpose(const T* in, std::size_t rows, std::size_t cols, T* out, ParallelFor parallel_for) {
  parallel_for(ceil_div(cols, kTile), 1, [&](std::size_t first, std::size_t last) {
    for (std::size_t c0 = first * kTile; c0 < std::min(cols, last * kTile); c0 += kTile)
      for (std::size_t r0 = 0; r0 < rows; r0 += kTile)
        for (std::size_t c = c0; c < std::min(cols, c0 + kTile); ++c)
          for (std::size_t r = r0; r < std::min(rows, r0 + kTile); ++r)
            out[c * rows + r] = in[r * cols + c];
  });
}

// One matrix into its place in a buffer.
std::optional<std::size_t> quantize_into(const SplitQuantizeJob& job, const void* input,
                                         std::size_t rows, std::size_t cols,
                                         const TensorScales* scales, std::uint8_t* buffer,
                                         const PackedPlace& place, ParallelFor parallel_for) {
  QuantizeJob one = {};
  one.format = job.info.kernels;
  one.dtype = job.dtype;
  one.input = input;
  one.elements = rows * cols;
  one.block = job.block;
  one.nonfinite = job.nonfinite;
  one.values = buffer + place.values;
  one.scales = buffer + place.scales;
  one.rule = job.rule;
  one.kind = job.info.kinds.front();
  one.shape = job.info.shape;
  one.matrix_rows = rows;
  one.cols = cols;
  if (scales != nullptr) {
    const bool divides = job.info.tensor_scale == TensorScale::kDivides;
    const float stored = divides ? scales->encode : scales->decode;
    std::memcpy(buffer + place.tensor, &stored, sizeof stored);
    one.tensors = scales;
    one.blocks_per_tensor = std::max<std::size_t>(one.blocks(), 1);
  }
  return quantize(one, parallel_for);
}

// The bytes behind each part, up to the next one.
void clear_padding(std::uint8_t* buffer, const PackedPlace& place) {
  const auto clear = [&](std::size_t begin, std::size_t bytes) {
    std::memset(buffer + begin + bytes, 0, aligned(bytes) - bytes);
  };
  clear(place.values, place.values_bytes);
  clear(place.scales, place.scales_bytes);
  clear(place.tensor, place.tensor_bytes);
}

}  // namespace

SplitPlaces place_splits(const FormatInfo& info, std::size_t block,
                         std::span<const std::size_t> splits, std::size_t cols, bool columnwise) {
  SplitPlaces found;
  for (std::size_t i = 0; i < splits.size(); ++i) {
    const std::size_t shape[] = {columnwise ? cols : splits[i], columnwise ? splits[i] : cols};
    try {
      matrix_shape(info, block, shape);
    } catch (const Error& error) {
      throw Error("split " + std::to_string(i) + (columnwise ? " columnwise: " : ": ") +
                  error.what());
    }
    PackedPlace place;
    const auto take = [&](std::size_t& begin, std::size_t& bytes, std::size_t wanted) {
      begin = found.size_bytes;
      bytes = wanted;
      found.size_bytes += aligned(wanted);
    };
    const std::size_t blocks = block_count(info.shape, block, 1, shape[0], shape[1]);
    take(place.values, place.values_bytes, packed_bytes(info, shape[0] * shape[1]));
    take(place.scales, place.scales_bytes, size_bytes(info.kinds.front()) * blocks);
    take(place.tensor, place.tensor_bytes,
         info.tensor_scale == TensorScale::kNone ? 0 : sizeof(float));
    found.places.push_back(place);
  }
  return found;
}

std::optional<std::size_t> split_quantize(const SplitQuantizeJob& job, ParallelFor parallel_for) {
  SplitPlaces by_row, by_column;
  if (job.rowwise != nullptr)
    by_row = place_splits(job.info, job.block, job.splits, job.cols, /*columnwise=*/false);
  std::vector<std::uint8_t> transposed;
  if (job.columnwise != nullptr) {
    by_column = place_splits(job.info, job.block, job.splits, job.cols, /*columnwise=*/true);
    const std::size_t most =
        job.splits.empty() ? 0 : *std::max_element(job.splits.begin(), job.splits.end());
    transposed.resize(most * job.cols * size_bytes(job.dtype));
  }
  std::size_t before = 0;  // elements
  for (std::size_t i = 0; i < job.splits.size(); ++i) {
    const std::size_t rows = job.splits[i], count = rows * job.cols;
    const auto* input =
        static_cast<const std::uint8_t*>(job.input) + before * size_bytes(job.dtype);
    TensorScales scales;
    const bool scaled = job.info.tensor_scale != TensorScale::kNone;
    if (scaled)
      scales =
          choose_tensor_scales(job.info.kernels, job.rule, job.dtype, input, count, parallel_for);
    const TensorScales* given = scaled ? &scales : nullptr;
    if (job.rowwise != nullptr) {
      clear_padding(job.rowwise, by_row.places[i]);
      const auto bad = quantize_into(job, input, rows, job.cols, given, job.rowwise,
                                     by_row.places[i], parallel_for);
      if (bad) return before + *bad;
    }
    if (job.columnwise != nullptr) {
      clear_padding(job.columnwise, by_column.places[i]);
      with_type(job.dtype, [&]<class T>() {
        transpose(reinterpret_cast<const T*>(input), rows, job.cols,
                  reinterpret_cast<T*>(transposed.data()), parallel_for);
      });
      const auto bad = quantize_into(job, transposed.data(), job.cols, rows, given, job.columnwise,
                                     by_column.places[i], parallel_for);
      if (bad) return before + *bad % rows * job.cols + *bad / rows;
    }
    before += count;
  }
  return std::nullopt;
}

}  // namespace monograph
