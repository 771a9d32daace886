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

// Bytes of elements of a row.
template <class F>
[[gnu::always_inline]] constexpr std::size_t bytes_of(std::size_t elements) {
  if constexpr (std::is_same_v<F, Plain>)
    return 2 * elements;
  else
    return elements / F::kPerByte;
}
// Bytes of a group.
template <class F>
inline constexpr std::size_t kGroupBytes = bytes_of<F>(32);

[[gnu::always_inline]] inline void store_interleaved(__m512i even, __m512i odd, std::byte* out) {
  _mm512_store_si512(out, _mm512_unpacklo_epi16(even, odd));
  _mm512_store_si512(out + kTileBytes, _mm512_unpackhi_epi16(even, odd));
}

// How a panel lies on the weight. Forward a unit is groups of one row, and rows of the weight are
// rows of tiles: [step][row / 16][row % 16][32].
template <std::size_t kPanel>
struct ForwardPanel {
  static constexpr std::size_t kRows = 1;  // of the weight in a unit
  static constexpr std::size_t kGroupStride = kStepBytes<kPanel>;
  // Rows on that are prefetched: soon wanted, and far enough for memory.
  static constexpr std::size_t kAhead = 4;
  static constexpr bool kScalesAhead = false;
  [[gnu::always_inline]] static WeightArea area(const DecodeJob& job) {
    return {job.first, job.width, job.begin, job.count};
  }
  [[gnu::always_inline]] static std::size_t offset(std::size_t row) { return row * 64; }
};

// For dx a unit is groups of two rows, which interleaved are a row of eight tiles:
// [step][col / 16][row / 2][16][2]. An odd last row is in no unit.
template <std::size_t kPanel>
struct DxPanel {
  static constexpr std::size_t kRows = 2;
  static constexpr std::size_t kGroupStride = 2 * kTileBytes;
  // The same columns: a line of memory that the hardware does not foresee.
  static constexpr std::size_t kAhead = 16;
  static constexpr bool kScalesAhead = true;  // few bytes of a row, each row's in a line of its own
  [[gnu::always_inline]] static WeightArea area(const DecodeJob& job) {
    return {job.begin, job.count, job.first, job.width};
  }
  [[gnu::always_inline]] static std::size_t offset(std::size_t row) {
    return row / 32 * kStepBytes<kPanel> + row % 32 * 32;
  }
};

// A place in a panel that is being decoded, unit by unit: kUnit groups of 32 elements in one block.
// It can be left and taken up again, so that a product decodes the next panel between its tiles.
template <class F, class V, class Panel, std::size_t kUnit>
class PanelCursor {
 public:
  [[gnu::always_inline]] PanelCursor(const DecodeJob& job, std::size_t done)
      : job_(job),
        decoder_(job, Panel::area(job)),
        cols_(job.weight->packed.cols),
        units_(Panel::area(job).cols / (32 * kUnit)),
        rows_(Panel::area(job).rows / kRows * kRows),
        ahead_(bytes_of<F>(Panel::kAhead * cols_)),
        row_(done / units_ * kRows) {
    start_row(done % units_);
  }
  static std::size_t total(const DecodeJob& job) {
    const WeightArea area = Panel::area(job);
    return area.rows / kRows * (area.cols / (32 * kUnit));
  }
  std::size_t done() const { return row_ / kRows * units_ + unit_; }

  [[gnu::always_inline]] void step(std::size_t units) {
    for (; units != 0 && row_ != rows_; --units) {
      prefetch();
      decode_unit();
      values_ += kUnitBytes;
      second_ += kUnitBytes;
      element_ += 32 * kUnit;
      out_ += kUnit * Panel::kGroupStride;
      if (++unit_ == units_) {
        row_ += kRows;
        start_row(0);
      }
    }
  }

 private:
  static constexpr std::size_t kRows = Panel::kRows, kUnitBytes = kUnit * kGroupBytes<F>;

  [[gnu::always_inline]] void prefetch() const {
    unrolled<ceil_div(kUnitBytes, 64)>([&](auto line) __attribute__((always_inline)) {
      _mm_prefetch(values_ + ahead_ + 64 * line, _MM_HINT_T0);
      if constexpr (kRows == 2) _mm_prefetch(second_ + ahead_ + 64 * line, _MM_HINT_T0);
    });
  }

  [[gnu::always_inline]] void decode_unit() const {
    const WeightArea area = Panel::area(job_);
    const std::size_t row = area.row + row_, col = area.col + unit_ * 32 * kUnit;
    const auto first = decoder_.unit(row, col, element_);
    if constexpr (kRows == 1) {
      first.template groups<kUnit>(
          values_, [&](auto g, __m512i group) __attribute__((always_inline)) {
            _mm512_store_si512(out_ + g * Panel::kGroupStride, group);
          });
    } else {
      const auto second = decoder_.unit(row + 1, col, element_ + cols_);
      __m512i even[kUnit];
      first.template groups<kUnit>(
          values_, [&](auto g, __m512i group) __attribute__((always_inline)) { even[g] = group; });
      second.template groups<kUnit>(
          second_, [&](auto g, __m512i group) __attribute__((always_inline)) {
            store_interleaved(even[g], group, out_ + g * Panel::kGroupStride);
          });
    }
  }

  [[gnu::always_inline]] void start_row(std::size_t unit) {
    unit_ = unit;
    if (row_ == rows_) return;
    const WeightArea area = Panel::area(job_);
    element_ = job_.weight->packed.element(area.row + row_, area.col + unit * 32 * kUnit);
    values_ = job_.weight->packed.values + bytes_of<F>(element_);
    second_ = values_ + bytes_of<F>(cols_);
    if constexpr (Panel::kScalesAhead && !std::is_same_v<F, Plain>) {
      _mm_prefetch(decoder_.scale_of(element_ + Panel::kAhead * cols_), _MM_HINT_T0);
      _mm_prefetch(decoder_.scale_of(element_ + (Panel::kAhead + 1) * cols_), _MM_HINT_T0);
    }
    out_ = job_.out + Panel::offset(row_) + unit * kUnit * Panel::kGroupStride;
  }

  const DecodeJob job_;  // a copy: the compiler would read a reference again after every store
  const TileDecoder<F> decoder_;
  const std::size_t cols_, units_, rows_, ahead_;
  std::size_t row_, unit_, element_;
  const std::uint8_t *values_, *second_;  // of the unit, and of its second row
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

// All of a panel. Out of line: next to the buffered path the loop would spill its registers.
template <class Cursor, class V>
[[gnu::noinline]] void decode_from(const DecodeJob& job, std::size_t done) {
  Cursor(job, done).step(Cursor::total(job));
}

// For any weight and alignment. Out of line: all panels have it for every format, which is much to
// compile, and a call is little beside a row.
template <class F, class V>
[[gnu::noinline]] void decode_to_buffer(const LinearWeight& weight, std::size_t row,
                                        std::size_t begin, std::size_t end, Bf16* out) {
  decode_elements<F, V>(weight, row, begin, end, out);
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
    decode_to_buffer<F, V>(weight, row, begin + c, begin + c + n, elements);
    for (; n % 32 != 0; ++n) elements[n] = Bf16{0};
    for (std::size_t i = 0; i < n; i += 32, out += kStepBytes<kPanel>)
      _mm512_store_si512(out, to_tile_order(_mm512_load_si512(elements + i)));
  }
}

// Rows of bf16 of any length, as the factors of a LoRA have them; zeros behind the last element.
template <class V, std::size_t kPanel>
[[gnu::noinline]] void load_forward_rows(const DecodeJob& job) {
  const PackedView& packed = job.weight->packed;
  for (std::size_t r = 0; r < job.width; ++r) {
    const std::uint8_t* in =
        packed.values + packed.element(job.first + r, job.begin) * sizeof(Bf16);
    std::byte* out = job.out + r * 64;
    for (std::size_t c = 0; c < job.count; c += 32, in += 64, out += kStepBytes<kPanel>) {
      const __mmask32 mask = first_lanes(static_cast<std::int64_t>(job.count - c));
      _mm512_store_si512(out, to_tile_order(_mm512_maskz_loadu_epi16(mask, in)));
    }
  }
}

// Rows beyond job.width are not written: they give rows of the result that nobody reads.
template <class F, class V, std::size_t kPanel>
void decode_forward_panel(const DecodeJob& job) {
  if constexpr (!std::is_same_v<F, ByRows>)
    if (in_pairs_of_groups<F>(job, job.begin | job.count))
      return decode_from<PanelCursor<F, V, ForwardPanel<kPanel>, 2>, V>(job, 0);
  if constexpr (std::is_same_v<F, Plain>) {
    if (job.weight->dtype == DType::kBFloat16) return load_forward_rows<V, kPanel>(job);
  } else if constexpr (!std::is_same_v<F, ByRows>) {
    if (in_groups<F>(job))
      return decode_from<PanelCursor<F, V, ForwardPanel<kPanel>, 1>, V>(job, 0);
  }
  for (std::size_t r = 0; r < job.width; ++r)
    decode_groups_buffered<F, V, kPanel>(*job.weight, job.first + r, job.begin, job.count,
                                         job.out + r * 64);
}

// Up to two rows of any weight, by way of a buffer; zeros for a row that is not there.
template <class F, class V, std::size_t kPanel>
[[gnu::always_inline]] inline void decode_row_pair_buffered(const LinearWeight& weight,
                                                            std::size_t row, std::size_t rows,
                                                            std::size_t begin, std::size_t count,
                                                            std::byte* out) {
  alignas(64) Bf16 elements[2][kPanel] = {};
  for (std::size_t i = 0; i < rows; ++i)
    decode_to_buffer<F, V>(weight, row + i, begin, begin + count, elements[i]);
  for (std::size_t i = 0; i < count; i += 32, out += 2 * kTileBytes)
    store_interleaved(to_tile_order(_mm512_load_si512(elements[0] + i)),
                      to_tile_order(_mm512_load_si512(elements[1] + i)), out);
}

template <class F, class V, std::size_t kPanel>
void decode_dx_panel(const DecodeJob& job) {
  std::size_t r = 0;
  if constexpr (!std::is_same_v<F, ByRows>) {
    if (in_pairs_of_groups<F>(job, job.first | job.width)) {
      r = job.count / 2 * 2;
      decode_from<PanelCursor<F, V, DxPanel<kPanel>, 2>, V>(job, 0);
    } else if constexpr (!std::is_same_v<F, Plain>) {
      if (in_groups<F>(job)) {
        r = job.count / 2 * 2;
        decode_from<PanelCursor<F, V, DxPanel<kPanel>, 1>, V>(job, 0);
      }
    }
  }
  for (; r < (job.count + 31) / 32 * 32; r += 2) {
    const std::size_t valid = r >= job.count ? 0 : job.count - r < 2 ? 1 : 2;
    decode_row_pair_buffered<F, V, kPanel>(*job.weight, job.begin + r, valid, job.first, job.width,
                                           job.out + r / 32 * kStepBytes<kPanel> + r % 32 * 32);
  }
}

}  // namespace monograph
