// dequantize on a GPU: the bits of the CPU's kernels, for every format and output type.
#pragma once

#include "monograph/gpu/decode.h"

namespace monograph::gpu {

inline constexpr unsigned kDequantizeThreads = 128;
inline constexpr unsigned kDequantizePieces = 4;  // of a thread
inline constexpr std::size_t kDequantizeElements =
    std::size_t{kPiece} * kDequantizePieces * kDequantizeThreads;  // of a block

// Blocks of a launch; none for a weight without elements, which is not launched.
constexpr std::size_t dequantize_blocks(std::size_t elements) {
  return ceil_div(elements, kDequantizeElements);
}

// One element by its number in the output.
template <class F, class T>
MONOGRAPH_DEVICE void dequantize_one(const PackedView& weight, const DecodeTable& table,
                                     std::size_t i, T* out) {
  const std::size_t row = F::kShape == BlockShape::kSquare ? i / weight.cols : 0;
  const std::size_t element = weight.origin + i;
  const float scale =
      block_scale_of<F>(weight.scales, block_of<F>(weight, element, row, i - row * weight.cols));
  write(out + i, round_to<T>(decode_element<F, T>(weight, table, element, scale)));
}

// out[rows * cols] = the weight, row-major: y = value(code) * scale, rounded to fp32 and then to T.
// `weight` holds pointers of the device, and is whole or a slice of rows (`slice_rows`): a panel.
// A launch has dequantize_blocks(rows * cols) blocks of kDequantizeThreads threads.
template <class F, class T>
MONOGRAPH_KERNEL(kDequantizeThreads)
dequantize_kernel(PackedView weight, T* out) {
  DecodeTable& table = shared_memory<DecodeTable>();
  fill_table<F>(table);
  sync_threads();
  const std::size_t elements = weight.rows * weight.cols;
  // Pieces of rows, where blocks know rows.
  const bool whole = has_whole_pieces<F>(weight) && is_aligned(out, 16) &&
                     (F::kShape != BlockShape::kSquare || weight.cols % kPiece == 0);
  const std::size_t first = block_index_x() * kDequantizeElements + thread_index() * kPiece;
  for (unsigned p = 0; p < kDequantizePieces; ++p) {
    const std::size_t begin = first + std::size_t{p} * kPiece * kDequantizeThreads;
    if (whole && begin + kPiece <= elements) {
      const std::size_t row = F::kShape == BlockShape::kSquare ? begin / weight.cols : 0;
      const std::size_t element = weight.origin + begin;
      const float scale = block_scale_of<F>(
          weight.scales, block_of<F>(weight, element, row, begin - row * weight.cols));
      float values[kPiece];
      decode_piece<F, T>(weight, table, element, scale, values);
      write_piece(out + begin, values);
    } else {
      for (std::size_t i = begin; i < begin + kPiece && i < elements; ++i)
        dequantize_one<F, T>(weight, table, i, out);
    }
  }
}

}  // namespace monograph::gpu
