// The rotary embedding of llama.cpp's "llama" rotates neighbouring rows of a head, that of
// transformers the two halves: row t * half + i of a head in the checkpoint is row 2 i + t there.
#pragma once

#include <cstdint>

namespace monograph::gguf {

// The row of the checkpoint that llama.cpp has as `row`; heads of `head_rows` rows, an even number.
constexpr std::uint64_t source_row(std::uint64_t row, std::uint64_t head_rows) {
  const std::uint64_t inside = row % head_rows;
  return row - inside + inside % 2 * (head_rows / 2) + inside / 2;
}

// The way back: the row of llama.cpp that the checkpoint has as `row`.
constexpr std::uint64_t stored_row(std::uint64_t row, std::uint64_t head_rows) {
  const std::uint64_t inside = row % head_rows, half = head_rows / 2;
  return row - inside + inside % half * 2 + inside / half;
}

}  // namespace monograph::gguf
