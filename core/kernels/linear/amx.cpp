// The bf16 product on AMX tiles. Compiled with the flags of this instruction set and nothing else.
#include "kernels/linear/amx_decode.h"
#include "kernels/linear/amx_pack.h"

namespace monograph {
namespace {

using V = simd::Amx;

// The accumulators are tiles 0-3, the weight is in 4 and 5, the left operand in 6 and 7. Forward
// the weight is the first factor of the tile product, for dx the second; its argument numbers must
// be literals.
struct Forward {
  static constexpr std::size_t kTiles = kForwardPanel / 16, kStep = kForwardStep;
  static void finish(const FinishJob& job) { finish_forward<V>(job); }
  [[gnu::always_inline]] static void product_00() { _tile_dpbf16ps(0, 4, 6); }
  [[gnu::always_inline]] static void product_01() { _tile_dpbf16ps(1, 4, 7); }
  [[gnu::always_inline]] static void product_10() { _tile_dpbf16ps(2, 5, 6); }
  [[gnu::always_inline]] static void product_11() { _tile_dpbf16ps(3, 5, 7); }
  [[gnu::always_inline]] static void column_1() { _tile_dpbf16ps(1, 5, 6); }
  [[gnu::always_inline]] static void column_2() { _tile_dpbf16ps(2, 4, 6); }
  [[gnu::always_inline]] static void column_3() { _tile_dpbf16ps(3, 5, 6); }
};
struct Dx {
  static constexpr std::size_t kTiles = kDxPanel / 16, kStep = kDxStep;
  static void finish(const FinishJob& job) { finish_dx<V>(job); }
  [[gnu::always_inline]] static void product_00() { _tile_dpbf16ps(0, 6, 4); }
  [[gnu::always_inline]] static void product_01() { _tile_dpbf16ps(1, 7, 4); }
  [[gnu::always_inline]] static void product_10() { _tile_dpbf16ps(2, 6, 5); }
  [[gnu::always_inline]] static void product_11() { _tile_dpbf16ps(3, 7, 5); }
  [[gnu::always_inline]] static void column_1() { _tile_dpbf16ps(1, 6, 5); }
  [[gnu::always_inline]] static void column_2() { _tile_dpbf16ps(2, 6, 4); }
  [[gnu::always_inline]] static void column_3() { _tile_dpbf16ps(3, 6, 5); }
};

[[gnu::always_inline]] inline void load_accumulators(const float* a, const float* b, const float* c,
                                                     const float* d, bool accumulate) {
  if (accumulate) {
    _tile_loadd(0, a, 64);
    _tile_loadd(1, b, 64);
    _tile_loadd(2, c, 64);
    _tile_loadd(3, d, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
}

[[gnu::always_inline]] inline void store_accumulators(float* a, float* b, float* c, float* d) {
  _tile_stored(0, a, 64);
  _tile_stored(1, b, 64);
  _tile_stored(2, c, 64);
  _tile_stored(3, d, 64);
}

constexpr std::size_t kTileFloats = 256;
// A block of the left operand, 32 KiB, then stays in the first-level cache while the panel streams
// past it.
constexpr std::size_t kChunk = 512;

// Two tiles of the left operand by two of the weight: one tile load for each product. Both operands
// come from the second-level cache and would only push each other out of the first: with the
// streaming hint the loop reaches 75 % of a bare one instead of 65-70 %.
template <class P, class Side>
[[gnu::always_inline]] inline void multiply_2x2(const std::byte* left, const std::byte* panel,
                                                std::size_t steps, float* c, bool accumulate,
                                                Side& side) {
  float* below = c + P::kTiles * kTileFloats;  // the second tile of rows
  load_accumulators(c, below, c + kTileFloats, below + kTileFloats, accumulate);
  for (std::size_t s = 0; s < steps; ++s, left += 2 * kTileBytes, panel += P::kStep) {
    _tile_stream_loadd(4, panel, 64);
    _tile_loadd(6, left, 64);
    P::product_00();
    _tile_loadd(7, left + kTileBytes, 64);
    P::product_01();
    _tile_stream_loadd(5, panel + kTileBytes, 64);
    P::product_10();
    P::product_11();
    side.step();
  }
  store_accumulators(c, below, c + kTileFloats, below + kTileFloats);
}

// One tile of the left operand by four of the weight: for 16 rows or fewer. Two accumulators would
// wait for each other: a product takes 52 cycles, one starts every 16.
template <class P, class Side>
[[gnu::always_inline]] inline void multiply_1x4(const std::byte* left, const std::byte* panel,
                                                std::size_t steps, float* c, bool accumulate,
                                                Side& side) {
  float *c1 = c + kTileFloats, *c2 = c1 + kTileFloats, *c3 = c2 + kTileFloats;
  load_accumulators(c, c1, c2, c3, accumulate);
  for (std::size_t s = 0; s < steps; ++s, left += 2 * kTileBytes, panel += P::kStep) {
    _tile_loadd(6, left, 64);
    _tile_loadd(4, panel, 64);
    P::product_00();
    _tile_loadd(5, panel + kTileBytes, 64);
    P::column_1();
    _tile_loadd(4, panel + 2 * kTileBytes, 64);
    P::column_2();
    _tile_loadd(5, panel + 3 * kTileBytes, 64);
    P::column_3();
    side.step();
  }
  store_accumulators(c, c1, c2, c3);
}

// The part of a job for `count` entries from `p` on.
template <class P>
[[gnu::always_inline]] inline void finish_part(const FinishJob& job, std::size_t p,
                                               std::size_t count) {
  if (p >= job.width) return;
  P::finish({job.c + p / 16 * kTileFloats,
             job.bias == nullptr ? nullptr : static_cast<const Bf16*>(job.bias) + p, job.rows,
             job.width - p < count ? job.width - p : count, static_cast<Bf16*>(job.out) + p,
             job.stride});
}

// c is [row / 16][entry / 16] tiles of 16 x 16.
template <class P, class Side>
[[gnu::always_inline]] inline void multiply_tiles(const MultiplyJob& job, Side& side) {
  // The tile loads below do not tell the compiler that they read memory.
  asm volatile("" ::: "memory");
  const std::size_t steps = (job.count + 31) / 32, tiles = (job.width + 15) / 16;
  if (job.rows > 16) {
    for (std::size_t t = 0; t < tiles; t += 2) {
      multiply_2x2<P>(job.left, job.panel + t * kTileBytes, steps, job.c + t * kTileFloats,
                      job.accumulate, side);
      // One behind, so that its vector work overlaps with products already under way.
      if (job.finish != nullptr && t != 0) finish_part<P>(*job.finish, 16 * (t - 2), 32);
    }
    if (job.finish != nullptr && tiles != 0) finish_part<P>(*job.finish, (tiles - 1) / 2 * 32, 32);
  } else {
    for (std::size_t t = 0; t < tiles; t += 4)
      multiply_1x4<P>(job.left, job.panel + t * kTileBytes, steps, job.c + t * kTileFloats,
                      job.accumulate, side);
    if (job.finish != nullptr) P::finish(*job.finish);
  }
}

struct Nothing {
  [[gnu::always_inline]] void step() {}
};

template <class P>
void multiply(const MultiplyJob& job) {
  Nothing nothing;
  multiply_tiles<P>(job, nothing);
}

template <class Cursor>
struct Beside {
  Cursor cursor;
  std::size_t per_step;
  [[gnu::always_inline]] void step() { cursor.step(per_step); }
};

template <class P, class Cursor>
void multiply_beside(const MultiplyJob& job, DecodeAhead& ahead) {
  Beside<Cursor> side{Cursor(ahead.job, ahead.done), ahead.per_step};
  multiply_tiles<P>(job, side);
  ahead.done = side.cursor.done();
}

template <class Cursor>
void decode_rest(const DecodeAhead& ahead) {
  if (ahead.done < Cursor::total(ahead.job)) decode_from<Cursor, V>(ahead.job, ahead.done);
}

template <class P, class Cursor>
constexpr AheadKernels kAhead = {Cursor::total, multiply_beside<P, Cursor>, decode_rest<Cursor>};

template <class... Fs>
const AheadKernels* forward_ahead_of(FormatList<Fs...>, Format format) {
  const AheadKernels* found = nullptr;
  ((format == Fs::kFormat ? void(found = &kAhead<Forward, ForwardCursor<Fs, V, 2>>) : void()), ...);
  return found;
}
template <class... Fs>
const AheadKernels* dx_ahead_of(FormatList<Fs...>, Format format) {
  const AheadKernels* found = nullptr;
  ((format == Fs::kFormat ? void(found = &kAhead<Dx, DxCursor<Fs, V, 2>>) : void()), ...);
  return found;
}

// The common case only: blocks of 64 or more, rows a multiple of 64.
const AheadKernels* forward_ahead(const DecodeJob& job) {
  if (!in_pairs_of_groups(job.weight->packed, job.begin | job.count)) return nullptr;
  return forward_ahead_of(PackedFormats{}, job.weight->packed.format);
}
const AheadKernels* dx_ahead(const DecodeJob& job) {
  if (job.count % 32 != 0) return nullptr;
  if (!in_pairs_of_groups(job.weight->packed, job.first | job.width)) return nullptr;
  return dx_ahead_of(PackedFormats{}, job.weight->packed.format);
}

void enter() { V::configure(); }
void leave() { V::release(); }

DecodeFn* forward_decoder(Format format) {
  return find_decoder(PackedFormats{}, format,
                      []<class F>() -> DecodeFn* { return decode_forward_panel<F, V>; });
}
DecodeFn* dx_decoder(Format format) {
  return find_decoder(PackedFormats{}, format,
                      []<class F>() -> DecodeFn* { return decode_dx_panel<F, V>; });
}

constexpr LinearKernels kForward = {.block = 32,
                                    .panel = kForwardPanel,
                                    .step = 32,
                                    .chunk = kChunk,
                                    .left_bytes = 2,
                                    .panel_step_bytes = kForwardStep,
                                    .panel_products = kForwardPanel / 32,
                                    .enter = enter,
                                    .leave = leave,
                                    .pack = pack_forward<V>,
                                    .multiply = multiply<Forward>,
                                    .decoder = forward_decoder,
                                    .ahead = forward_ahead};
constexpr LinearKernels kDx = {.block = 32,
                               .panel = kDxPanel,
                               .step = 32,
                               .chunk = kChunk,
                               .left_bytes = 2,
                               .panel_step_bytes = kDxStep,
                               .panel_products = kDxPanel / 32,
                               .enter = enter,
                               .leave = leave,
                               .pack = pack_dx<V>,
                               .multiply = multiply<Dx>,
                               .decoder = dx_decoder,
                               .ahead = dx_ahead};

}  // namespace

template <class W>
const LinearKernels* find_linear(DType dtype, Pass pass);

// fp16 and fp32 run on AVX-512: these tiles know neither.
template <>
const LinearKernels* find_linear<V>(DType dtype, Pass pass) {
  if (dtype != DType::kBFloat16) return nullptr;
  return pass == Pass::kForward ? &kForward : &kDx;
}

}  // namespace monograph
