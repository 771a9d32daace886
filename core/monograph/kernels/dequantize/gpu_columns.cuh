// Some columns of a weight on a GPU: the panel of a product whose sum runs over the weight's rows.
#pragma once

#include "monograph/kernels/dequantize/gpu.cuh"

namespace monograph::gpu {

// rows * count of a launch: their numbers are divided in 32 bits.
inline constexpr std::size_t kDequantizeColumnsElements = 0xffffffff - kDequantizeElements;

// out[rows, count], row-major = columns [first, first + count) of every row, as dequantize_kernel
// gives them. A launch has dequantize_blocks(rows * count) blocks of kDequantizeThreads threads.
template <class F, class T>
MONOGRAPH_KERNEL(kDequantizeThreads)
dequantize_columns_kernel(PackedView weight, std::uint32_t first, std::uint32_t count, T* out) {
  DecodeTable& table = shared_memory<DecodeTable>();
  fill_table<F>(table);
  sync_threads();
  const std::uint32_t elements = static_cast<std::uint32_t>(weight.rows) * count;
  const bool whole = has_whole_pieces<F>(weight) && is_aligned(out, 16) &&
                     weight.cols % kPiece == 0 && first % kPiece == 0 && count % kPiece == 0;
  const std::uint32_t from =
      block_index_x() * std::uint32_t{kDequantizeElements} + thread_index() * kPiece;
  for (unsigned p = 0; p < kDequantizePieces; ++p) {
    const std::uint32_t begin = from + p * kPiece * kDequantizeThreads;
    for (std::uint32_t i = begin; i < begin + kPiece && i < elements; ++i) {
      const std::uint32_t row = i / count;
      const std::size_t col = std::size_t{first} + (i - row * count);
      const std::size_t element = weight.origin + row * weight.cols + col;
      const float scale = block_scale_of<F>(weight.scales, block_of<F>(weight, element, row, col));
      if (whole) {
        float values[kPiece];
        decode_piece<F, T>(weight, table, element, scale, values);
        write_piece(out + begin, values);
        break;
      }
      write(out + i, round_to<T>(decode_element<F, T>(weight, table, element, scale)));
    }
  }
}

}  // namespace monograph::gpu
