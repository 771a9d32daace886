// quantize on a GPU: the bytes of the CPU's kernels, NaN and infinities included. A job's pointers
// are those of the device; `first_bad` is there for NonFinite::kError: it holds ~0 before the
// launch and the smallest index of a non-finite element behind it (the outputs are then not to be
// used).
#pragma once

#include "monograph/gpu/choose_scale.h"
#include "monograph/kernels/quantize/quantize.h"

namespace monograph::gpu {

inline constexpr std::uint32_t kInfinity = 0x7f800000;
inline constexpr unsigned kQuantizeThreads = 128;
// Below this a scale's reciprocal would overflow; bitsandbytes clamps here.
inline constexpr float kLeastScale = 1e-38f;

template <class T>
MONOGRAPH_DEVICE std::uint32_t magnitude_bits(T x) {
  return as_bits(widen(x)) & 0x7fffffffu;
}
MONOGRAPH_DEVICE std::uint32_t larger(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }
MONOGRAPH_DEVICE std::uint32_t largest_of_warp(std::uint32_t bits) {
  for (unsigned mask = kLanes / 2; mask != 0; mask /= 2)
    bits = larger(bits, shuffle_xor(bits, mask));
  return bits;
}
// Numbers of a checkpoint, at any address.
MONOGRAPH_DEVICE void write_low_bytes(std::uint8_t* p, std::uint32_t value, unsigned bytes) {
  for (unsigned i = 0; i < bytes; ++i) write(p + i, static_cast<std::uint8_t>(value >> 8 * i));
}

// ---- tables of sixteen values, one absmax a flat block: a warp each ----

struct EncodeTable {
  float bounds[16];
  std::uint32_t order[16];
};
// The midpoint of neighbouring values in fp32; the last is never reached.
template <class F, std::size_t kIndex>
inline constexpr float kBoundEntry = kIndex == 15 ? 2.0f
                                                  : (F::kValues[F::kOrder[kIndex]] +
                                                     F::kValues[F::kOrder[(kIndex + 1) % 16]]) /
                                                        2.0f;
template <class F, std::size_t kIndex>
inline constexpr std::uint32_t kOrderEntry = F::kOrder[kIndex];

template <class F, std::size_t... kIndex>
MONOGRAPH_DEVICE void fill_encode_table(EncodeTable& table, std::index_sequence<kIndex...>) {
  float bound = 0.0f;
  std::uint32_t code = 0;
  const unsigned i = thread_index();
  ((i == kIndex ? void((bound = kBoundEntry<F, kIndex>, code = kOrderEntry<F, kIndex>)) : void()),
   ...);
  if (i >= 16) return;
  write(&table.bounds[i], bound);
  write(&table.order[i], code);
}

// Counts the bounds below v: a tie goes to the lower interval.
MONOGRAPH_DEVICE std::uint32_t encode_by(const EncodeTable& table, float v) {
  unsigned index = 0;
  for (unsigned width = 8; width != 0; width /= 2)
    if (v > read(&table.bounds[index + width - 1])) index += width;
  return read(&table.order[index]);
}

// A full block is multiplied by the reciprocal, the last one if it is partial is divided: as
// bitsandbytes does, and the CPU's kernels.
struct AbsmaxScaling {
  float stored, factor;
  bool divide, saturate;

  MONOGRAPH_DEVICE float operator()(float x) const {
    const std::uint32_t a = as_bits(x) & 0x7fffffffu;
    if (saturate && a >= kInfinity)
      return a > kInfinity ? 0.0f : as_bits(x) >> 31 != 0 ? -1.0f : 1.0f;
    return divide ? div(x, factor) : mul(x, factor);
  }
};
MONOGRAPH_DEVICE AbsmaxScaling absmax_scaling(std::uint32_t bits, bool partial, bool saturate) {
  const float absmax = as_float(bits);
  const float clamped = absmax < kLeastScale ? kLeastScale : absmax;
  if (partial && !saturate) return {clamped, clamped, true, false};
  return {absmax, div(1.0f, clamped), false, saturate};
}

constexpr std::size_t quantize_absmax_grid(std::size_t blocks) {
  return ceil_div(blocks, kQuantizeThreads / kLanes);
}
template <class F, class T>
MONOGRAPH_KERNEL(kQuantizeThreads)
quantize_absmax_kernel(QuantizeJob job, std::uint64_t* first_bad) {
  EncodeTable& table = shared_memory<EncodeTable>();
  fill_encode_table<F>(table, std::make_index_sequence<16>{});
  sync_threads();
  const std::size_t block =
      std::size_t{block_index_x()} * (kQuantizeThreads / kLanes) + thread_index() / kLanes;
  const std::size_t begin = block * job.block;
  if (begin >= job.elements) return;
  const std::size_t left = job.elements - begin, count = left < job.block ? left : job.block;
  const T* const in = static_cast<const T*>(job.input) + begin;
  const unsigned lane = thread_index() % kLanes;
  std::uint32_t bits = 0, finite = 0;
  std::size_t bad = count;
  for (std::size_t i = lane; i < count; i += kLanes) {
    const std::uint32_t a = magnitude_bits(read(in + i));
    bits = larger(bits, a);
    if (a < kInfinity)
      finite = larger(finite, a);
    else if (bad == count)
      bad = i;
  }
  const bool saturate = largest_of_warp(bits) >= kInfinity;
  finite = largest_of_warp(finite);
  if (saturate && job.nonfinite == NonFinite::kError) {
    if (bad < count) atomic_min(first_bad, begin + bad);
    return;
  }
  const AbsmaxScaling scaling = absmax_scaling(finite, count < job.block, saturate);
  if (lane == 0) write_low_bytes(job.scales + 4 * block, as_bits(scaling.stored), 4);
  for (std::size_t i = 2 * lane; i < count; i += 2 * kLanes) {
    const std::uint32_t even = encode_by(table, scaling(widen(read(in + i))));
    const float next = i + 1 < count ? scaling(widen(read(in + i + 1))) : 0.0f;
    write(job.values + (begin + i) / 2,
          static_cast<std::uint8_t>(even << 4 | encode_by(table, next)));
  }
}

// ---- small floating-point elements ----

// The code of one element; a NaN counts as 0, an infinity as the largest value.
template <class F>
MONOGRAPH_DEVICE std::uint32_t element_code_of(float x, const Scaling& scaling) {
  const std::uint32_t a = as_bits(x) & 0x7fffffffu;
  if (a > kInfinity) return 0;
  if (a < kInfinity)
    x = add(scaling.divide ? div(x, scaling.factor) : mul(x, scaling.factor), scaling.zero);
  return F::Element::encode(x);
}

MONOGRAPH_DEVICE RuleContext context_of(const QuantizeJob& job, std::size_t block) {
  RuleContext context = {job.rule, job.kind, {}};
  if (job.tensors != nullptr) {
    const TensorScales* at = job.tensors + block / job.blocks_per_tensor;
    context.tensor = {read(&at->encode), read(&at->decode)};
  }
  return context;
}

// Blocks of 16 or 32 elements of a row: a thread each.
constexpr std::size_t quantize_rows_grid(std::size_t blocks) {
  return ceil_div(blocks, kQuantizeThreads);
}
template <class F, class T>
MONOGRAPH_KERNEL(kQuantizeThreads)
quantize_rows_kernel(QuantizeJob job, std::uint64_t* first_bad) {
  const std::size_t block = std::size_t{block_index_x()} * kQuantizeThreads + thread_index();
  const std::size_t begin = block * F::kBlock;
  if (begin >= job.elements) return;
  const T* const in = static_cast<const T*>(job.input) + begin;
  std::uint32_t finite = 0;
  for (unsigned i = 0; i < F::kBlock; ++i) {
    const std::uint32_t a = magnitude_bits(read(in + i));
    if (a < kInfinity) {
      finite = larger(finite, a);
    } else if (job.nonfinite == NonFinite::kError) {
      atomic_min(first_bad, begin + i);
      return;
    }
  }
  const BlockScale chosen = choose_block_scale<F>(context_of(job, block), as_float(finite));
  write(job.scales + block, static_cast<std::uint8_t>(chosen.stored));
  for (unsigned i = 0; i < F::kBlock; i += F::kPerByte) {
    std::uint32_t byte = element_code_of<F>(widen(read(in + i)), chosen.scaling);
    if constexpr (F::kPerByte == 2)
      byte |= element_code_of<F>(widen(read(in + i + 1)), chosen.scaling) << 4;
    write(job.values + (begin + i) / F::kPerByte, static_cast<std::uint8_t>(byte));
  }
}

// Square blocks: a block of threads each, whose grid is job.blocks().
inline constexpr unsigned kQuantizeSquareThreads = 256;
struct SquareShared {
  std::uint32_t largest[kQuantizeSquareThreads / kLanes];
};
template <class F, class T>
MONOGRAPH_KERNEL(kQuantizeSquareThreads)
quantize_squares_kernel(QuantizeJob job, std::uint64_t* first_bad) {
  SquareShared& shared = shared_memory<SquareShared>();
  const std::size_t across = (job.cols + F::kBlock - 1) / F::kBlock;
  const std::size_t down = (job.matrix_rows + F::kBlock - 1) / F::kBlock;
  const std::size_t block = block_index_x(), matrix = block / (across * down);
  const std::size_t row = block / across % down * F::kBlock, col = block % across * F::kBlock;
  const std::size_t rows_left = job.matrix_rows - row, cols_left = job.cols - col;
  const unsigned rows = static_cast<unsigned>(rows_left < F::kBlock ? rows_left : F::kBlock);
  const unsigned width = static_cast<unsigned>(cols_left < F::kBlock ? cols_left : F::kBlock);
  const std::size_t begin = (matrix * job.matrix_rows + row) * job.cols + col;
  const T* const in = static_cast<const T*>(job.input) + begin;
  std::uint32_t finite = 0;
  for (unsigned i = thread_index(); i < rows * F::kBlock; i += kQuantizeSquareThreads) {
    const unsigned r = i / F::kBlock, c = i % F::kBlock;
    if (c >= width) continue;
    const std::uint32_t a = magnitude_bits(read(in + r * job.cols + c));
    if (a < kInfinity)
      finite = larger(finite, a);
    else if (job.nonfinite == NonFinite::kError)
      atomic_min(first_bad, begin + r * job.cols + c);
  }
  finite = largest_of_warp(finite);
  if (thread_index() % kLanes == 0) write(&shared.largest[thread_index() / kLanes], finite);
  sync_threads();
  for (unsigned i = 0; i < kQuantizeSquareThreads / kLanes; ++i)
    finite = larger(finite, read(&shared.largest[i]));
  const BlockScale chosen = choose_block_scale<F>(context_of(job, block), as_float(finite));
  if (thread_index() == 0) {
    const unsigned bytes = static_cast<unsigned>(size_bytes(job.kind));
    write_low_bytes(job.scales + bytes * block, chosen.stored, bytes);
  }
  for (unsigned i = thread_index(); i < rows * F::kBlock; i += kQuantizeSquareThreads) {
    const unsigned r = i / F::kBlock, c = i % F::kBlock;
    if (c >= width) continue;
    const std::size_t at = r * job.cols + c;
    write(job.values + begin + at,
          static_cast<std::uint8_t>(element_code_of<F>(widen(read(in + at)), chosen.scaling)));
  }
}

// The kernel of a format, and its launch.
constexpr std::size_t quantize_grid(const QuantizeJob& job) {
  if (job.shape == BlockShape::kFlat)
    return quantize_absmax_grid(ceil_div(job.elements, job.block));
  if (job.shape == BlockShape::kRow) return quantize_rows_grid(ceil_div(job.elements, job.block));
  const std::size_t matrix = job.matrix_rows * job.cols;
  return matrix == 0 ? 0
                     : job.elements / matrix * ceil_div(job.matrix_rows, job.block) *
                           ceil_div(job.cols, job.block);
}

// ---- the scale of a whole matrix ----

// largest[y] becomes the largest finite magnitude of matrix y of `count` elements, as bits; it is 0
// before. Any number of blocks in x.
template <class T>
MONOGRAPH_KERNEL(kQuantizeThreads)
largest_magnitude_kernel(const T* input, std::size_t count, unsigned blocks_x,
                         std::uint32_t* largest) {
  const T* const in = input + block_index_y() * count;
  std::uint32_t finite = 0;
  for (std::size_t i = std::size_t{block_index_x()} * kQuantizeThreads + thread_index(); i < count;
       i += std::size_t{blocks_x} * kQuantizeThreads) {
    const std::uint32_t a = magnitude_bits(read(in + i));
    if (a < kInfinity) finite = larger(finite, a);
  }
  finite = largest_of_warp(finite);
  if (thread_index() % kLanes == 0) atomic_max(largest + block_index_y(), finite);
}

// A thread for each matrix.
template <class = void>
MONOGRAPH_KERNEL(kQuantizeThreads)
nvfp4_tensor_scales_kernel(ScaleRule rule, const std::uint32_t* largest, std::size_t count,
                           TensorScales* scales) {
  const std::size_t i = std::size_t{block_index_x()} * kQuantizeThreads + thread_index();
  if (i >= count) return;
  const TensorScales found = nvfp4_tensor_scales(rule, as_float(read(largest + i)));
  write(&scales[i].encode, found.encode);
  write(&scales[i].decode, found.decode);
}

}  // namespace monograph::gpu
