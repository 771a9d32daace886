// Weights to AMX tiles: panels of units (amx_units.h). The left operand follows the order of a
// unit's elements forward, the columns of the result are put back for dx. A step is one cache line
// longer than its tiles: without it a row of a panel falls into two sets of the first-level cache
// and decoding takes twice as long.
#pragma once

#include <immintrin.h>

#include "monograph/kernels/linear/amx_units.h"
#include "monograph/kernels/linear/elements.h"
#include "monograph/simd/amx.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

// Bytes of a step of a panel of kPanel entries.
template <std::size_t kPanel>
inline constexpr std::size_t kStepBytes = kPanel / 16 * kTileBytes + 64;
// Elements of a row that pass through a buffer at a time.
inline constexpr std::size_t kBuffer = 512;

// Bytes of a group.
template <class F>
inline constexpr std::size_t kGroupBytes = 32 / F::kPerByte;

// A place in a panel that is being decoded, unit by unit: kUnit groups of 32 elements in one block.
// It can be left and taken up again, so that a product decodes the next panel between its tiles.
template <class F, class V, std::size_t kPanel, std::size_t kUnit>
class ForwardCursor {
 public:
  [[gnu::always_inline]] ForwardCursor(const DecodeJob& job, std::size_t done)
      : job_(job),
        decoder_(job, {job.first, job.width, job.begin, job.count}),
        cols_(job.weight->packed.cols),
        units_(job.count / (32 * kUnit)),
        rows_(job.width),
        ahead_(4 * cols_ / F::kPerByte),
        row_(done / units_) {
    start_row(done % units_);
  }
  static std::size_t total(const DecodeJob& job) { return job.width * (job.count / (32 * kUnit)); }
  std::size_t done() const { return row_ * units_ + unit_; }

  [[gnu::always_inline]] void step(std::size_t units) {
    for (; units != 0 && row_ != rows_; --units) {
      // Four rows on: soon wanted, and far enough for memory.
      _mm_prefetch(values_ + ahead_, _MM_HINT_T0);
      const auto unit = decoder_.unit(job_.first + row_, job_.begin + unit_ * 32 * kUnit, element_);
      unit.template groups<kUnit>(
          values_, [&](auto g, __m512i group) __attribute__((always_inline)) {
            _mm512_store_si512(out_ + g * kStepBytes<kPanel>, group);
          });
      values_ += kGroupBytes<F> * kUnit;
      element_ += 32 * kUnit;
      out_ += kUnit * kStepBytes<kPanel>;
      if (++unit_ == units_) {
        ++row_;
        start_row(0);
      }
    }
  }

 private:
  [[gnu::always_inline]] void start_row(std::size_t unit) {
    unit_ = unit;
    if (row_ == rows_) return;
    element_ = job_.weight->packed.element(job_.first + row_, job_.begin + unit * 32 * kUnit);
    values_ = job_.weight->packed.values + element_ / F::kPerByte;
    out_ = job_.out + row_ * 64 + unit * kUnit * kStepBytes<kPanel>;
  }

  const DecodeJob job_;  // a copy: the compiler would read a reference again after every store
  const TileDecoder<F> decoder_;
  const std::size_t cols_, units_, rows_, ahead_;
  std::size_t row_, unit_, element_;
  const std::uint8_t* values_;
  std::byte* out_;
};

// The same for a weight in bf16, which only needs another order.
template <class V, std::size_t kPanel, std::size_t kUnit>
class ForwardCursor<Plain, V, kPanel, kUnit> {
 public:
  [[gnu::always_inline]] ForwardCursor(const DecodeJob& job, std::size_t done)
      : first_(job.weight->packed.values + 2 * job.weight->packed.element(job.first, job.begin)),
        panel_(job.out),
        stride_(2 * job.weight->packed.cols),
        units_(job.count / (32 * kUnit)),
        rows_(job.width),
        row_(done / units_) {
    start_row(done % units_);
  }
  static std::size_t total(const DecodeJob& job) { return job.width * (job.count / (32 * kUnit)); }
  std::size_t done() const { return row_ * units_ + unit_; }

  [[gnu::always_inline]] void step(std::size_t units) {
    for (; units != 0 && row_ != rows_; --units) {
      unrolled<kUnit>([&](auto g) __attribute__((always_inline)) {
        _mm_prefetch(values_ + 4 * stride_ + 64 * g, _MM_HINT_T0);
        _mm512_store_si512(out_ + g * kStepBytes<kPanel>,
                           to_tile_order(_mm512_loadu_si512(values_ + 64 * g)));
      });
      values_ += 64 * kUnit;
      out_ += kUnit * kStepBytes<kPanel>;
      if (++unit_ == units_) {
        ++row_;
        start_row(0);
      }
    }
  }

 private:
  [[gnu::always_inline]] void start_row(std::size_t unit) {
    unit_ = unit;
    values_ = first_ + row_ * stride_ + unit * 64 * kUnit;
    out_ = panel_ + row_ * 64 + unit * kUnit * kStepBytes<kPanel>;
  }

  const std::uint8_t* const first_;
  std::byte* const panel_;
  const std::size_t stride_, units_, rows_;
  std::size_t row_, unit_;
  const std::uint8_t* values_;
  std::byte* out_;
};

// Whether a panel is made of units of two groups whose scales its decoder finds: one for both in an
// absmax format, any in the others; none in bf16.
template <class F>
[[gnu::always_inline]] inline bool in_pairs_of_groups(const DecodeJob& job, std::size_t columns) {
  const PackedView& packed = job.weight->packed;
  if ((packed.cols | packed.origin | columns) % 64 != 0) return false;
  if constexpr (std::is_same_v<F, Plain>)
    return job.weight->dtype == DType::kBFloat16;
  else
    return (F::kBlock != 0 || packed.block >= 64) && TileDecoder<F>::fits(job);
}

// Whether all of it is made of groups of 32 that lie in one block each, or in two whole ones.
template <class F>
[[gnu::always_inline]] inline bool in_groups(const DecodeJob& job) {
  const PackedView& packed = job.weight->packed;
  return (packed.cols | packed.origin) % 32 == 0 && TileDecoder<F>::fits(job);
}

// All of a panel. Out of line: beside the buffered road the loop would spill its registers.
template <class Cursor, class V>
[[gnu::noinline]] void decode_from(const DecodeJob& job, std::size_t done) {
  Cursor(job, done).step(Cursor::total(job));
}

// The same for any weight and alignment, by way of a buffer; the last group is filled up with
// zeros.
template <class F, class V, std::size_t kPanel>
[[gnu::always_inline]] inline void decode_groups_buffered(const LinearWeight& weight,
                                                          std::size_t row, std::size_t begin,
                                                          std::size_t count, std::byte* out) {
  alignas(64) Bf16 elements[kBuffer];
  for (std::size_t c = 0; c < count; c += kBuffer) {
    std::size_t n = count - c < kBuffer ? count - c : kBuffer;
    decode_elements<F, V>(weight, row, begin + c, begin + c + n, elements);
    for (; n % 32 != 0; ++n) elements[n] = Bf16{0};
    for (std::size_t i = 0; i < n; i += 32, out += kStepBytes<kPanel>)
      _mm512_store_si512(out, to_tile_order(_mm512_load_si512(elements + i)));
  }
}

// Rows of the weight are rows of tiles: [step][row / 16][row % 16][32]. Rows beyond job.width are
// not written: they give rows of the result that nobody reads.
template <class F, class V, std::size_t kPanel>
void decode_forward_panel(const DecodeJob& job) {
  if (in_pairs_of_groups<F>(job, job.begin | job.count))
    return decode_from<ForwardCursor<F, V, kPanel, 2>, V>(job, 0);
  if constexpr (!std::is_same_v<F, Plain>) {
    if (in_groups<F>(job)) return decode_from<ForwardCursor<F, V, kPanel, 1>, V>(job, 0);
  }
  for (std::size_t r = 0; r < job.width; ++r)
    decode_groups_buffered<F, V, kPanel>(*job.weight, job.first + r, job.begin, job.count,
                                         job.out + r * 64);
}

[[gnu::always_inline]] inline void store_interleaved(__m512i even, __m512i odd, std::byte* out) {
  _mm512_store_si512(out, _mm512_unpacklo_epi16(even, odd));
  _mm512_store_si512(out + kTileBytes, _mm512_unpackhi_epi16(even, odd));
}

// The same for dx: a unit is kUnit groups of two rows. An odd last row is not its business.
template <class F, class V, std::size_t kPanel, std::size_t kUnit>
class DxCursor {
 public:
  [[gnu::always_inline]] DxCursor(const DecodeJob& job, std::size_t done)
      : job_(job),
        decoder_(job, {job.begin, job.count, job.first, job.width}),
        cols_(job.weight->packed.cols),
        units_(job.width / (32 * kUnit)),
        rows_(job.count / 2 * 2),
        ahead_(16 * cols_ / F::kPerByte),
        row_(done / units_ * 2) {
    start_row(done % units_);
  }
  static std::size_t total(const DecodeJob& job) {
    return job.count / 2 * (job.width / (32 * kUnit));
  }
  std::size_t done() const { return row_ / 2 * units_ + unit_; }

  [[gnu::always_inline]] void step(std::size_t units) {
    for (; units != 0 && row_ != rows_; --units) {
      // Sixteen rows on, the same columns: a line of memory that the hardware does not foresee.
      _mm_prefetch(even_ + ahead_, _MM_HINT_T0);
      _mm_prefetch(odd_ + ahead_, _MM_HINT_T0);
      const std::size_t row = job_.begin + row_, col = job_.first + unit_ * 32 * kUnit;
      const auto even = decoder_.unit(row, col, element_);
      const auto odd = decoder_.unit(row + 1, col, element_ + cols_);
      __m512i first[kUnit];
      even.template groups<kUnit>(
          even_, [&](auto g, __m512i group) __attribute__((always_inline)) { first[g] = group; });
      odd.template groups<kUnit>(
          odd_, [&](auto g, __m512i group) __attribute__((always_inline)) {
            store_interleaved(first[g], group, out_ + g * 2 * kTileBytes);
          });
      even_ += kGroupBytes<F> * kUnit;
      odd_ += kGroupBytes<F> * kUnit;
      element_ += 32 * kUnit;
      out_ += kUnit * 2 * kTileBytes;
      if (++unit_ == units_) {
        row_ += 2;
        start_row(0);
      }
    }
  }

 private:
  [[gnu::always_inline]] void start_row(std::size_t unit) {
    unit_ = unit;
    if (row_ == rows_) return;
    element_ = job_.weight->packed.element(job_.begin + row_, job_.first + unit * 32 * kUnit);
    even_ = job_.weight->packed.values + element_ / F::kPerByte;
    odd_ = even_ + cols_ / F::kPerByte;
    // Their scales: few bytes of a row, each row's in a line of its own.
    _mm_prefetch(decoder_.scale_of(element_ + 16 * cols_), _MM_HINT_T0);
    _mm_prefetch(decoder_.scale_of(element_ + 17 * cols_), _MM_HINT_T0);
    out_ =
        job_.out + row_ / 32 * kStepBytes<kPanel> + row_ % 32 * 32 + unit * kUnit * 2 * kTileBytes;
  }

  const DecodeJob job_;
  const TileDecoder<F> decoder_;
  const std::size_t cols_, units_, rows_, ahead_;
  std::size_t row_, unit_, element_;
  const std::uint8_t *even_, *odd_;
  std::byte* out_;
};

// The same for a weight in bf16.
template <class V, std::size_t kPanel, std::size_t kUnit>
class DxCursor<Plain, V, kPanel, kUnit> {
 public:
  [[gnu::always_inline]] DxCursor(const DecodeJob& job, std::size_t done)
      : first_(job.weight->packed.values + 2 * job.weight->packed.element(job.begin, job.first)),
        panel_(job.out),
        stride_(2 * job.weight->packed.cols),
        units_(job.width / (32 * kUnit)),
        rows_(job.count / 2 * 2),
        row_(done / units_ * 2) {
    start_row(done % units_);
  }
  static std::size_t total(const DecodeJob& job) {
    return job.count / 2 * (job.width / (32 * kUnit));
  }
  std::size_t done() const { return row_ / 2 * units_ + unit_; }

  [[gnu::always_inline]] void step(std::size_t units) {
    for (; units != 0 && row_ != rows_; --units) {
      unrolled<kUnit>([&](auto g) __attribute__((always_inline)) {
        const std::uint8_t *even = values_ + 64 * g, *odd = even + stride_;
        _mm_prefetch(even + 16 * stride_, _MM_HINT_T0);
        _mm_prefetch(odd + 16 * stride_, _MM_HINT_T0);
        store_interleaved(to_tile_order(_mm512_loadu_si512(even)),
                          to_tile_order(_mm512_loadu_si512(odd)), out_ + g * 2 * kTileBytes);
      });
      values_ += 64 * kUnit;
      out_ += kUnit * 2 * kTileBytes;
      if (++unit_ == units_) {
        row_ += 2;
        start_row(0);
      }
    }
  }

 private:
  [[gnu::always_inline]] void start_row(std::size_t unit) {
    unit_ = unit;
    values_ = first_ + row_ * stride_ + unit * 64 * kUnit;
    out_ = panel_ + row_ / 32 * kStepBytes<kPanel> + row_ % 32 * 32 + unit * kUnit * 2 * kTileBytes;
  }

  const std::uint8_t* const first_;
  std::byte* const panel_;
  const std::size_t stride_, units_, rows_;
  std::size_t row_, unit_;
  const std::uint8_t* values_;
  std::byte* out_;
};

// Up to two rows of any weight, by way of a buffer; zeros for a row that is not there.
template <class F, class V, std::size_t kPanel>
[[gnu::always_inline]] inline void decode_row_pair_buffered(const LinearWeight& weight,
                                                            std::size_t row, std::size_t rows,
                                                            std::size_t begin, std::size_t count,
                                                            std::byte* out) {
  alignas(64) Bf16 elements[2][kPanel] = {};
  for (std::size_t i = 0; i < rows; ++i)
    decode_elements<F, V>(weight, row + i, begin, begin + count, elements[i]);
  for (std::size_t i = 0; i < count; i += 32, out += 2 * kTileBytes)
    store_interleaved(to_tile_order(_mm512_load_si512(elements[0] + i)),
                      to_tile_order(_mm512_load_si512(elements[1] + i)), out);
}

// Two rows of the weight, interleaved, are a row of eight tiles: [step][col / 16][row / 2][16][2].
template <class F, class V, std::size_t kPanel>
void decode_dx_panel(const DecodeJob& job) {
  std::size_t r = 0;
  if (in_pairs_of_groups<F>(job, job.first | job.width)) {
    r = job.count / 2 * 2;
    decode_from<DxCursor<F, V, kPanel, 2>, V>(job, 0);
  } else if constexpr (!std::is_same_v<F, Plain>) {
    if (in_groups<F>(job)) {
      r = job.count / 2 * 2;
      decode_from<DxCursor<F, V, kPanel, 1>, V>(job, 0);
    }
  }
  for (; r < (job.count + 31) / 32 * 32; r += 2) {
    const std::size_t valid = r >= job.count ? 0 : job.count - r < 2 ? 1 : 2;
    decode_row_pair_buffered<F, V, kPanel>(*job.weight, job.begin + r, valid, job.first, job.width,
                                           job.out + r / 32 * kStepBytes<kPanel> + r % 32 * 32);
  }
}

}  // namespace monograph
