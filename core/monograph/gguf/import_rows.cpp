// Rows of a tensor in the order of transformers.
#include <vector>

#include "monograph/gguf/decode_blocks.h"
#include "monograph/gguf/import.h"
#include "monograph/gguf/row_order.h"

namespace monograph::gguf {

std::uint64_t rows_of(const ImportedTensor& tensor) {
  std::uint64_t rows = 1;
  for (std::size_t i = 0; i + 1 < tensor.shape.size(); ++i) rows *= tensor.shape[i];
  return rows;
}

void read_rows(const FileReader& file, const ImportedTensor& tensor, std::uint64_t begin,
               std::uint64_t end, float* out) {
  const TensorTypeInfo& type = info_of(tensor.info->type);
  const std::uint64_t cols = tensor.shape.back(), row_blocks = cols / type.block_elements;
  const std::uint64_t row_bytes = size_bytes(tensor.info->type, cols);
  const std::uint8_t* from = file.bytes(*tensor.info).data() + tensor.first_row * row_bytes;
  if (tensor.permuted_head_rows == 0) {
    decode(tensor.info->type, from + begin * row_bytes, (end - begin) * row_blocks, out);
  } else if (tensor.shape.size() == 1) {
    std::vector<float> stored(cols);
    decode(tensor.info->type, from, row_blocks, stored.data());
    for (std::uint64_t i = 0; i < cols; ++i) {
      out[source_row(i, tensor.permuted_head_rows)] = stored[i];
    }
  } else {
    for (std::uint64_t row = begin; row < end; ++row) {
      const std::uint64_t stored = stored_row(row, tensor.permuted_head_rows);
      decode(tensor.info->type, from + stored * row_bytes, row_blocks, out + (row - begin) * cols);
    }
  }
  if (!tensor.subtract_one) return;
  for (std::uint64_t i = 0; i < (end - begin) * cols; ++i) out[i] -= 1;
}

}  // namespace monograph::gguf
