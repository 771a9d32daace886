// Rows of a tensor in the order of transformers.
#include <algorithm>
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

namespace {

// Rows of the file that are decoded together: a line of the cache is filled before it is left.
constexpr std::uint64_t kRowsAtOnce = 16;

// Output `output` of an expert, its inputs.
void decode_output(const FileReader& file, const ImportedTensor& tensor, std::uint64_t expert,
                   std::uint64_t output, float* out) {
  const bool in_turns = tensor.odd != nullptr;
  const TensorInfo& info = in_turns && output % 2 == 1 ? *tensor.odd : *tensor.info;
  const std::uint64_t cols = info.shape[2];
  const std::uint64_t row = expert * info.shape[1] + (in_turns ? output / 2 : output);
  decode(info.type, file.bytes(info).data() + row * size_bytes(info.type, cols),
         cols / info_of(info.type).block_elements, out);
}

void read_stack(const FileReader& file, const ImportedTensor& tensor, std::uint64_t begin,
                std::uint64_t end, float* out) {
  const std::uint64_t inputs = tensor.shape[1], outputs = tensor.shape[2];
  std::vector<float> lines(kRowsAtOnce * inputs);
  while (begin < end) {
    const std::uint64_t expert = begin / inputs, first = begin % inputs;
    const std::uint64_t count = std::min(inputs - first, end - begin);
    for (std::uint64_t at = 0; at < outputs; at += kRowsAtOnce) {
      const std::uint64_t some = std::min(kRowsAtOnce, outputs - at);
      for (std::uint64_t i = 0; i < some; ++i) {
        decode_output(file, tensor, expert, at + i, lines.data() + i * inputs);
      }
      for (std::uint64_t row = 0; row < count; ++row) {
        for (std::uint64_t i = 0; i < some; ++i) {
          out[row * outputs + at + i] = lines[i * inputs + first + row];
        }
      }
    }
    begin += count;
    out += count * outputs;
  }
}

void read_biases(const FileReader& file, const ImportedTensor& tensor, std::uint64_t begin,
                 std::uint64_t end, float* out) {
  const std::uint64_t cols = tensor.info->shape[1], step = tensor.odd == nullptr ? 1 : 2;
  std::vector<float> line(cols);
  for (std::uint64_t expert = begin; expert < end; ++expert, out += tensor.shape[1]) {
    for (std::uint64_t part = 0; part < step; ++part) {
      const TensorInfo& info = part == 0 ? *tensor.info : *tensor.odd;
      decode(info.type, file.bytes(info).data() + expert * size_bytes(info.type, cols),
             cols / info_of(info.type).block_elements, line.data());
      for (std::uint64_t i = 0; i < cols; ++i) out[i * step + part] = line[i];
    }
  }
}

}  // namespace

void read_rows(const FileReader& file, const ImportedTensor& tensor, std::uint64_t begin,
               std::uint64_t end, float* out) {
  if (tensor.stacked) {
    return tensor.shape.size() == 3 ? read_stack(file, tensor, begin, end, out)
                                    : read_biases(file, tensor, begin, end, out);
  }
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
