// Forward for 16 rows or fewer, straight from packed bytes: every weight is decoded once and
// multiplied once, so what it decodes to should not leave the first-level cache. A piece is 32 rows
// of the weight by 256 columns; while its tiles are multiplied, the next piece is decoded between
// them. The sums stay in two tiles over the whole reduction of a job: the chain over tiles of 32 in
// which every other path sums, and so the same bits.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <utility>

#include "monograph/kernels/linear/amx_decode.h"
#include "monograph/kernels/linear/amx_pack.h"
#include "monograph/kernels/linear/kernels.h"

namespace monograph {

// kPanel: entries of the panel, which is what the sums are laid out for.
template <class F, class V, std::size_t kPanel>
class FewForward {
 public:
  [[gnu::always_inline]] FewForward(const MultiplyJob& multiply, const DecodeJob& decode)
      : multiply_(multiply),
        decode_(decode),
        decoder_(decode, {decode.first, decode.width, decode.begin, decode.count}),
        values_(decode.weight->packed.values),
        origin_(decode.weight->packed.origin),
        cols_(decode.weight->packed.cols) {}

  [[gnu::always_inline]] void run() {
    // The tile loads do not tell the compiler that they read memory.
    asm volatile("" ::: "memory");
    std::byte *now = decode_.out, *later = now + kPieceBytes;
    Piece piece = piece_at(0, 0);
    for (std::size_t r = 0; r < piece.rows; ++r) decode_row(piece, r, now);
    while (piece.rows != 0) {
      const Piece next = after(piece);
      multiply_piece(piece, now, next, later);
      std::swap(now, later);
      piece = next;
    }
    if (multiply_.finish != nullptr) finish_forward<V, kPanel>(*multiply_.finish);
  }

 private:
  // Two pieces and the left operand that streams by fit 48 KiB. With 16 rows the left operand would
  // be loaded twice as often, with 64 the pieces of a row would be too short for memory.
  static constexpr std::size_t kRows = 32, kCols = 256;
  static constexpr std::size_t kStep = kStepBytes<kRows>;
  static constexpr std::size_t kPieceBytes = kCols / 32 * kStep;
  // Rows from one that is decoded to one that is prefetched: 2 KiB of the weight.
  static constexpr std::size_t kAhead = 8 * F::kPerByte;

  struct Piece {
    std::size_t row, rows, col, cols;  // within the job
  };
  Piece piece_at(std::size_t row, std::size_t col) const {
    return {row, std::min(kRows, decode_.width - row), col, std::min(kCols, decode_.count - col)};
  }
  // To the right, then below; no rows after the last one.
  Piece after(const Piece& piece) const {
    if (piece.col + kCols < decode_.count) return piece_at(piece.row, piece.col + kCols);
    if (piece.row + kRows < decode_.width) return piece_at(piece.row + kRows, 0);
    return {};
  }

  [[gnu::always_inline]] void multiply_piece(const Piece& piece, const std::byte* now,
                                             const Piece& next, std::byte* later) {
    float *sums = multiply_.c + piece.row * 16, *below = sums + 256;
    if (piece.col == 0 && multiply_.accumulate) {
      _tile_loadd(0, sums, 64);
      _tile_loadd(1, below, 64);
    } else if (piece.col == 0) {
      _tile_zero(0);
      _tile_zero(1);
    }
    const std::byte* left = multiply_.left + piece.col / 32 * 2 * kTileBytes;
    const std::size_t steps = piece.cols / 32, rows_a_step = (next.rows + steps - 1) / steps;
    std::size_t row = 0;
    for (std::size_t s = 0; s < steps; ++s, left += 2 * kTileBytes, now += kStep) {
      _tile_loadd(6, left, 64);
      _tile_loadd(4, now, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, now + kTileBytes, 64);
      _tile_dpbf16ps(1, 5, 6);
      for (const std::size_t end = std::min(row + rows_a_step, next.rows); row < end; ++row)
        decode_row(next, row, later);
    }
    if (piece.col + piece.cols == decode_.count) {
      _tile_stored(0, sums, 64);
      _tile_stored(1, below, 64);
    }
  }

  [[gnu::always_inline]] void decode_row(const Piece& piece, std::size_t r, std::byte* panel) {
    const std::size_t row = decode_.first + piece.row + r, ahead = ahead_of(piece, r);
    std::size_t col = decode_.begin + piece.col, element = origin_ + row * cols_ + col;
    const std::uint8_t* values = values_ + element / F::kPerByte;
    std::byte* out = panel + r * 64;
    _mm_prefetch(decoder_.scale_of(element + ahead * F::kPerByte), _MM_HINT_T0);
    for (std::size_t units = piece.cols / 64; units != 0; --units) {
      _mm_prefetch(values + ahead, _MM_HINT_T0);
      decoder_.unit(row, col, element)
          .template groups<2>(
              values, [out](auto g, __m512i group) __attribute__((always_inline)) {
                _mm512_store_si512(out + g * kStep, group);
              });
      values += 2 * kGroupBytes<F>;
      col += 64;
      element += 64;
      out += 2 * kStep;
    }
  }

  // Bytes from a row of a piece to the one that is decoded kAhead rows later; modulo 2^64, for it
  // may lie before. Where rows end it is only near.
  std::size_t ahead_of(const Piece& piece, std::size_t r) const {
    const std::size_t stride = cols_ / F::kPerByte;
    if (r + kAhead < kRows) return kAhead * stride;
    if (piece.col + kCols < decode_.count) return kCols / F::kPerByte - (kRows - kAhead) * stride;
    return kAhead * stride - piece.col / F::kPerByte;
  }

  const MultiplyJob multiply_;  // copies: the compiler would read references again after a store
  const DecodeJob decode_;
  const TileDecoder<F> decoder_;
  const std::uint8_t* const values_;
  const std::size_t origin_, cols_;
};

template <class F, class V, std::size_t kPanel>
void multiply_few(const MultiplyJob& multiply, const DecodeJob& decode) {
  FewForward<F, V, kPanel>(multiply, decode).run();
}

}  // namespace monograph
