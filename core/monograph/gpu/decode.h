// Elements of a packed weight on a GPU: the rules of core/monograph/formats/, with every rounding
// spelt out (nothing is fused), and the bits of the CPU's kernels.
#pragma once

#include <utility>

#include "monograph/formats/all.h"
#include "monograph/gpu/prims.h"

namespace monograph::gpu {

// Elements that a thread decodes together.
inline constexpr unsigned kPiece = 8;

// ---- NaN as x86 gives it; a GPU has one NaN, 0x7fffffff, for all ----

MONOGRAPH_DEVICE float nan_from(float a, float b) {
  if (a != a) return as_float(as_bits(a) | 0x400000u);
  if (b != b) return as_float(as_bits(b) | 0x400000u);
  return as_float(0xffc00000u);  // of numbers: 0 * inf, inf - inf, 0 / 0
}
MONOGRAPH_DEVICE float mul_as_cpu(float a, float b) {
  const float r = mul(a, b);
  return r == r ? r : nan_from(a, b);
}
MONOGRAPH_DEVICE float add_as_cpu(float a, float b) {
  const float r = add(a, b);
  return r == r ? r : nan_from(a, b);
}
MONOGRAPH_DEVICE float div_as_cpu(float a, float b) {
  const float r = div(a, b);
  return r == r ? r : nan_from(a, b);
}

// ---- numbers of a checkpoint, which lie at any address ----

MONOGRAPH_DEVICE std::uint16_t read_u16(const std::uint8_t* p) {
  if (is_aligned(p, 2)) return read_as<std::uint16_t>(p);
  return static_cast<std::uint16_t>(read(p) | read(p + 1) << 8);
}
MONOGRAPH_DEVICE std::uint32_t read_u32(const std::uint8_t* p) {
  if (is_aligned(p, 4)) return read_as<std::uint32_t>(p);
  return static_cast<std::uint32_t>(read_u16(p)) | static_cast<std::uint32_t>(read_u16(p + 2))
                                                       << 16;
}
MONOGRAPH_DEVICE float read_f32(const std::uint8_t* p) { return as_float(read_u32(p)); }

// E4m3::decode in four operations: shifted into place an exponent is 120 too small, and the product
// is exact for subnormals too.
MONOGRAPH_DEVICE float e4m3_value(std::uint32_t code) {
  const std::uint32_t magnitude = code & 0x7f;
  if (magnitude == 0x7f) return as_float(0x7fc00000u);
  const std::uint32_t sign = (code & 0x80) << 24;
  return as_float(as_bits(mul(as_float(magnitude << 20), 0x1p120f)) | sign);
}

// ---- scales ----

MONOGRAPH_DEVICE float absmax_scale_of(const ScalesView& scales, std::size_t block) {
  if (scales.groups == nullptr) return read_f32(scales.blocks + 4 * block);
  const float entry =
      read_f32(scales.map + 4 * static_cast<std::size_t>(read(scales.blocks + block)));
  const float product = mul_as_cpu(entry, read_f32(scales.groups + 4 * (block / kScaleGroup)));
  const float offset =
      scales.offset_on_device == nullptr ? scales.offset : read_f32(scales.offset_on_device);
  return add_as_cpu(product, offset);
}

MONOGRAPH_DEVICE float fp8_scale_of(const ScalesView& scales, std::size_t block) {
  if (scales.kind == ScaleKind::kE8m0) return e8m0_value(read(scales.blocks + block));
  const float s = scales.kind == ScaleKind::kBf16 ? widen(Bf16{read_u16(scales.blocks + 2 * block)})
                                                  : read_f32(scales.blocks + 4 * block);
  return s != s ? as_float(0x7fc00000u) : s;
}

MONOGRAPH_DEVICE float with_tensor_scale(const ScalesView& scales, float s, float tensor) {
  return scales.tensor_divides ? div_as_cpu(s, tensor) : mul_as_cpu(s, tensor);
}
MONOGRAPH_DEVICE float tensor_scale_of(const ScalesView& scales, std::size_t block) {
  const std::size_t tensor = scales.blocks_per_tensor == 0 ? 0 : block / scales.blocks_per_tensor;
  return read_f32(scales.tensor + 4 * tensor);
}
MONOGRAPH_DEVICE float nvfp4_scale_of(const ScalesView& scales, std::size_t block) {
  const float s = e4m3_value(read(scales.blocks + block));
  if (scales.tensor == nullptr) return s;
  return with_tensor_scale(scales, s, tensor_scale_of(scales, block));
}

template <class F>
MONOGRAPH_DEVICE float block_scale_of(const ScalesView& scales, std::size_t block) {
  if constexpr (F::kShape == BlockShape::kFlat)
    return absmax_scale_of(scales, block);
  else if constexpr (F::kFormat == Format::kNvfp4)
    return nvfp4_scale_of(scales, block);
  else if constexpr (F::kFormat == Format::kFp8Block)
    return fp8_scale_of(scales, block);
  else
    return e8m0_value(read(scales.blocks + block));
}

// The number of a row's first block, where blocks are square.
template <class F>
MONOGRAPH_DEVICE std::size_t first_square_block(const PackedView& weight, std::size_t row) {
  std::size_t first = 0;
  const std::size_t per_row = (weight.cols + F::kBlock - 1) / F::kBlock;
  if (weight.origin != 0) row += weight.origin / weight.cols;
  if (weight.matrix_rows != 0) {
    const std::size_t down = (weight.matrix_rows + F::kBlock - 1) / F::kBlock;
    first = row / weight.matrix_rows * down * per_row;
    row %= weight.matrix_rows;
  }
  return first + row / F::kBlock * per_row;
}

// The number of the block that an element lies in, both counted from where `values` begins; (row,
// col) is the same element, and is looked at where blocks know rows.
template <class F>
MONOGRAPH_DEVICE std::size_t block_of(const PackedView& weight, std::size_t element,
                                      std::size_t row, std::size_t col) {
  if constexpr (F::kShape == BlockShape::kFlat)
    return element >> log2_of(weight.block);
  else if constexpr (F::kShape == BlockShape::kRow)
    return element / F::kBlock;
  else
    return first_square_block<F>(weight, row) + col / F::kBlock;
}

// ---- elements ----

// The sixteen values in shared memory, where a format has a table; nothing where it has none.
struct DecodeTable {
  float values[16];
};

// A constexpr array has no address on a GPU; its entries are constants.
template <class F, std::size_t kCode>
inline constexpr float kTableEntry = F::kValues[kCode];
template <class F, std::size_t... kCodes>
MONOGRAPH_DEVICE float table_value(unsigned code, std::index_sequence<kCodes...>) {
  float value = 0.0f;
  ((code == kCodes ? void(value = kTableEntry<F, kCodes>) : void()), ...);
  return value;
}

// Called by all threads; a barrier has to follow.
template <class F>
MONOGRAPH_DEVICE void fill_table(DecodeTable& table) {
  if constexpr (F::kPerByte == 2) {
    const unsigned code = thread_index();
    if (code < 16) write(&table.values[code], table_value<F>(code, std::make_index_sequence<16>{}));
  }
}

// A code's value times the scale, to be rounded to T.
template <class F, class T>
MONOGRAPH_DEVICE float scaled_value(const DecodeTable& table, std::uint32_t code, float scale) {
  float value;
  if constexpr (F::kPerByte == 2)
    value = read(&table.values[code]);
  else
    value = e4m3_value(code);
  // Rounding to bf16 makes one NaN of all.
  if constexpr (std::is_same_v<T, Bf16>) return mul(value, scale);
  return mul_as_cpu(value, scale);
}

template <class F, class T>
MONOGRAPH_DEVICE float decode_element(const PackedView& weight, const DecodeTable& table,
                                      std::size_t element, float scale) {
  const std::uint32_t byte = read(weight.values + element / F::kPerByte);
  if constexpr (F::kPerByte == 1) {
    return scaled_value<F, T>(table, byte, scale);
  } else {
    const bool high = (element % 2 == 0) == (F::kNibbles == Nibbles::kHighFirst);
    return scaled_value<F, T>(table, high ? byte >> 4 : byte & 15u, scale);
  }
}

// Whether eight elements from a multiple of eight on, in a row that begins with a multiple of
// eight, lie in one block and in an aligned word.
template <class F>
MONOGRAPH_DEVICE bool has_whole_pieces(const PackedView& weight) {
  return weight.origin % kPiece == 0 && is_aligned(weight.values, kPiece / F::kPerByte);
}

// Eight elements from `element` on, a multiple of eight of a weight with whole pieces.
template <class F, class T>
MONOGRAPH_DEVICE void decode_piece(const PackedView& weight, const DecodeTable& table,
                                   std::size_t element, float scale, float (&out)[kPiece]) {
  const std::uint8_t* at = weight.values + element / F::kPerByte;
  if constexpr (F::kPerByte == 1) {
    const Words2 words = read_as<Words2>(at);
    for (unsigned i = 0; i < kPiece; ++i)
      out[i] = scaled_value<F, T>(table, words.word[i / 4] >> 8 * (i % 4) & 255u, scale);
  } else {
    const std::uint32_t word = read_as<std::uint32_t>(at);
    for (unsigned i = 0; i < kPiece; ++i) {
      const unsigned flip = F::kNibbles == Nibbles::kHighFirst ? 4u : 0u;
      out[i] = scaled_value<F, T>(table, word >> (4 * i ^ flip) & 15u, scale);
    }
  }
}

// A row of a weight, with what its scales have in common: found once, as it takes divisions.
struct WeightRow {
  std::size_t begin;        // its first element, counted from where `values` begins
  bool whole;               // the weight has whole pieces, and its rows are multiples of eight
  std::size_t first_block;  // the number of the row's first, where blocks are square
  float tensor;             // the scale of the matrix, where there is one
};
template <class F>
MONOGRAPH_DEVICE WeightRow weight_row(const PackedView& weight, std::size_t row) {
  const std::size_t begin = weight.origin + row * weight.cols;
  WeightRow found = {begin, has_whole_pieces<F>(weight) && weight.cols % kPiece == 0, 0, 1.0f};
  if constexpr (F::kShape == BlockShape::kSquare)
    found.first_block = first_square_block<F>(weight, row);
  if constexpr (F::kFormat == Format::kNvfp4)
    if (weight.scales.tensor != nullptr)
      found.tensor = tensor_scale_of(weight.scales, begin / F::kBlock);
  return found;
}

// The scale of column `col` of a row.
template <class F>
MONOGRAPH_DEVICE float scale_in_row(const PackedView& weight, const WeightRow& row,
                                    std::size_t col) {
  const ScalesView& scales = weight.scales;
  if constexpr (F::kShape == BlockShape::kSquare) {
    return fp8_scale_of(scales, row.first_block + col / F::kBlock);
  } else if constexpr (F::kFormat == Format::kNvfp4) {
    const float s = e4m3_value(read(scales.blocks + (row.begin + col) / F::kBlock));
    return scales.tensor == nullptr ? s : with_tensor_scale(scales, s, row.tensor);
  } else {
    return block_scale_of<F>(scales, block_of<F>(weight, row.begin + col, 0, col));
  }
}

// Elements [col, col + 8) of a row, zeros from `end` on; `col` and `end` are multiples of eight
// where the row is whole.
template <class F, class T>
MONOGRAPH_DEVICE void decode_row_piece(const PackedView& weight, const DecodeTable& table,
                                       const WeightRow& row, std::size_t col, std::size_t end,
                                       float (&out)[kPiece]) {
  const std::size_t element = row.begin + col;
  if (row.whole && col < end) {
    decode_piece<F, T>(weight, table, element, scale_in_row<F>(weight, row, col), out);
    return;
  }
  MONOGRAPH_UNROLL
  for (unsigned i = 0; i < kPiece; ++i) out[i] = 0.0f;
  // One body for all eight: eight of them would take most of a kernel's code and its registers.
  MONOGRAPH_ROLLED
  for (unsigned i = 0; i < kPiece && col + i < end; ++i) {
    const float value =
        decode_element<F, T>(weight, table, element + i, scale_in_row<F>(weight, row, col + i));
    MONOGRAPH_UNROLL
    for (unsigned k = 0; k < kPiece; ++k)
      if (k == i) out[k] = value;
  }
}

// Eight elements to memory that is aligned to 16 bytes.
template <class T>
MONOGRAPH_DEVICE void write_piece(T* out, const float (&in)[kPiece]) {
  if constexpr (std::is_same_v<T, float>) {
    for (unsigned half = 0; half < 2; ++half) {
      Words4 words;
      for (unsigned i = 0; i < 4; ++i) words.word[i] = as_bits(in[4 * half + i]);
      write_as<Words4>(out + 4 * half, words);
    }
  } else {
    Words4 words;
    for (unsigned i = 0; i < 4; ++i) words.word[i] = pack_two<T>(in[2 * i], in[2 * i + 1]);
    write_as<Words4>(out, words);
  }
}

}  // namespace monograph::gpu
