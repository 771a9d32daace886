// The bf16 product on AMX tiles. Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/linear/amx_decode.h"
#include "monograph/kernels/linear/amx_few.h"
#include "monograph/kernels/linear/amx_pack.h"

namespace monograph {
namespace {

using V = simd::Amx;

// The accumulators are tiles 0-3, the weight is in 4 and 5, the left operand in 6 and 7. Forward
// the weight is the first factor of the tile product, for dx the second; its argument numbers must
// be literals.
template <std::size_t kPanelEntries>
struct Forward {
  static constexpr std::size_t kPanel = kPanelEntries;
  static constexpr std::size_t kTiles = kPanel / 16, kStep = kStepBytes<kPanel>;
  static constexpr bool kFinishInParts = true;
  template <class F>
  using Cursor = PanelCursor<F, V, ForwardPanel<kPanel>, 2>;
  template <class F>
  static constexpr DecodeFn* kDecode = decode_forward_panel<F, V, kPanel>;
  template <class F>
  static bool in_units(const DecodeJob& job) {
    return in_pairs_of_groups<F>(job, job.begin | job.count);
  }
  static constexpr std::size_t kAheadRows = 1;
  static void pack(const PackJob& job) { pack_forward<V>(job); }
  static void finish(const FinishJob& job) { finish_forward<V, kPanel>(job); }
  [[gnu::always_inline]] static void product_00() { _tile_dpbf16ps(0, 4, 6); }
  [[gnu::always_inline]] static void product_01() { _tile_dpbf16ps(1, 4, 7); }
  [[gnu::always_inline]] static void product_10() { _tile_dpbf16ps(2, 5, 6); }
  [[gnu::always_inline]] static void product_11() { _tile_dpbf16ps(3, 5, 7); }
  [[gnu::always_inline]] static void column_1() { _tile_dpbf16ps(1, 5, 6); }
  [[gnu::always_inline]] static void column_2() { _tile_dpbf16ps(2, 4, 6); }
  [[gnu::always_inline]] static void column_3() { _tile_dpbf16ps(3, 5, 6); }
};
template <std::size_t kPanelEntries>
struct Dx {
  static constexpr std::size_t kPanel = kPanelEntries;
  static constexpr std::size_t kTiles = kPanel / 16, kStep = kStepBytes<kPanel>;
  static constexpr bool kFinishInParts = false;
  template <class F>
  using Cursor = PanelCursor<F, V, DxPanel<kPanel>, 2>;
  template <class F>
  static constexpr DecodeFn* kDecode = decode_dx_panel<F, V, kPanel>;
  template <class F>
  static bool in_units(const DecodeJob& job) {
    return job.count % 32 == 0 && in_pairs_of_groups<F>(job, job.first | job.width);
  }
  static constexpr std::size_t kAheadRows = 256;
  static void pack(const PackJob& job) { pack_dx<V>(job); }
  static void finish(const FinishJob& job) { finish_dx<V, kPanel>(job); }
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

struct Nothing {
  [[gnu::always_inline]] void step() {}
};

// Two tiles of the left operand by two of the weight: one tile load for each product. The panel
// comes from the second-level cache and is used once for each block; without the streaming hint it
// would push the block out of the first: 61 % of a bare loop instead of 75 %.
template <class P>
[[gnu::always_inline]] inline void step_2x2(const std::byte* left, const std::byte* panel) {
  _tile_stream_loadd(4, panel, 64);
  _tile_loadd(6, left, 64);
  P::product_00();
  _tile_loadd(7, left + kTileBytes, 64);
  P::product_01();
  _tile_stream_loadd(5, panel + kTileBytes, 64);
  P::product_10();
  P::product_11();
}

// A sixteenth of the sums that the next 2 x 2 tiles continue, at each step of those before them:
// 4 KiB from beyond the first-level cache, in a long reduction from beyond the second. Waiting for
// them took 6 % of the time forward, 11 % for dx.
template <class P>
[[gnu::always_inline]] inline void prefetch_sums(const float* c, std::size_t step) {
  const float *const above = c + 32 * step, *const below = above + P::kTiles * kTileFloats;
  _mm_prefetch(above, _MM_HINT_T0);
  _mm_prefetch(above + 16, _MM_HINT_T0);
  _mm_prefetch(below, _MM_HINT_T0);
  _mm_prefetch(below + 16, _MM_HINT_T0);
}
// next_c: the sums that are wanted after these; it need not be memory.
template <class P, class Side>
[[gnu::always_inline]] inline void multiply_2x2(const MultiplyJob& job, const std::byte* panel,
                                                std::size_t steps, float* c, const float* next_c,
                                                Side& side) {
  float* below = c + P::kTiles * kTileFloats;  // the second tile of rows
  load_accumulators(c, below, c + kTileFloats, below + kTileFloats, job.accumulate);
  const std::byte* left = job.left;
  for (std::size_t s = 0; s < steps; ++s, left += 2 * kTileBytes, panel += P::kStep) {
    step_2x2<P>(left, panel);
    prefetch_sums<P>(next_c, s);
    side.step();
  }
  if (job.tail != nullptr) step_2x2<P>(job.tail, panel);
  store_accumulators(c, below, c + kTileFloats, below + kTileFloats);
}

// One tile of the left operand by four of the weight: for 16 rows or fewer. Two accumulators would
// wait for each other: a product takes 52 cycles, one starts every 16. Here decoding the next panel
// takes longer than the products, so it goes between any two of them: once per step was 9 % slower.
template <class P, class Side>
[[gnu::always_inline]] inline void step_1x4(const std::byte* left, const std::byte* panel,
                                            Side& side) {
  _tile_loadd(6, left, 64);
  _tile_stream_loadd(4, panel, 64);
  P::product_00();
  side.step();
  _tile_stream_loadd(5, panel + kTileBytes, 64);
  P::column_1();
  side.step();
  _tile_stream_loadd(4, panel + 2 * kTileBytes, 64);
  P::column_2();
  side.step();
  _tile_stream_loadd(5, panel + 3 * kTileBytes, 64);
  P::column_3();
  side.step();
}
template <class P, class Side>
[[gnu::always_inline]] inline void multiply_1x4(const MultiplyJob& job, const std::byte* panel,
                                                std::size_t steps, float* c, Side& side) {
  float *c1 = c + kTileFloats, *c2 = c1 + kTileFloats, *c3 = c2 + kTileFloats;
  load_accumulators(c, c1, c2, c3, job.accumulate);
  const std::byte* left = job.left;
  for (std::size_t s = 0; s < steps; ++s, left += 2 * kTileBytes, panel += P::kStep)
    step_1x4<P>(left, panel, side);
  Nothing nothing;
  if (job.tail != nullptr) step_1x4<P>(job.tail, panel, nothing);
  store_accumulators(c, c1, c2, c3);
}

// The part of a job for `count` entries from `p` on.
template <class P>
[[gnu::always_inline]] inline void finish_part(const FinishJob& job, std::size_t p,
                                               std::size_t count) {
  if (p >= job.width) return;
  P::finish({job.c + p / 16 * kTileFloats, job.gain == nullptr ? nullptr : job.gain + p,
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
      // After the last pair those of the next block, which lie behind.
      const std::size_t next = t + 2 < tiles ? t + 2 : 2 * P::kTiles;
      multiply_2x2<P>(job, job.panel + t * kTileBytes, steps, job.c + t * kTileFloats,
                      job.c + next * kTileFloats, side);
      // One behind, so that its shuffles overlap with products under way: 10 % of a forward of 512
      // tokens by 1024 x 1024. For dx, which shuffles little, whole rows are better.
      if (P::kFinishInParts && job.finish != nullptr && t != 0)
        finish_part<P>(*job.finish, 16 * (t - 2), 32);
    }
    if (job.finish != nullptr)
      finish_part<P>(*job.finish, P::kFinishInParts ? (tiles - 1) / 2 * 32 : 0, 16 * tiles);
  } else {
    for (std::size_t t = 0; t < tiles; t += 4)
      multiply_1x4<P>(job, job.panel + t * kTileBytes, steps, job.c + t * kTileFloats, side);
    if (job.finish != nullptr) P::finish(*job.finish);
  }
}

template <class P>
void multiply(const MultiplyJob& job) {
  Nothing nothing;
  multiply_tiles<P>(job, nothing);
}

// Decodes a share of the next panel at each step of a product.
template <class Cursor>
struct DecodeBetween {
  Cursor cursor;
  std::size_t per_step;
  [[gnu::always_inline]] void step() { cursor.step(per_step); }
};

// The next panel's units are spread evenly over this product's calls of step().
template <class P, class Cursor>
void multiply_and_decode(const MultiplyJob& job, DecodeAhead& ahead) {
  const std::size_t tiles = (job.width + 15) / 16;
  const std::size_t calls = (job.count + 31) / 32 * (job.rows > 16 ? (tiles + 1) / 2 : tiles);
  const std::size_t left = Cursor::total(ahead.job) - ahead.done;
  DecodeBetween<Cursor> side{Cursor(ahead.job, ahead.done), left / (calls * ahead.blocks + 1) + 1};
  multiply_tiles<P>(job, side);
  ahead.done = side.cursor.done();
  --ahead.blocks;
}

template <class Cursor>
void decode_rest(const DecodeAhead& ahead) {
  if (ahead.done < Cursor::total(ahead.job)) decode_from<Cursor, V>(ahead.job, ahead.done);
}

template <class P, class Cursor>
constexpr AheadKernels kAhead = {multiply_and_decode<P, Cursor>, decode_rest<Cursor>,
                                 P::kAheadRows};

// The common case only: rows of whole units.
template <class P, class... Fs>
const AheadKernels* find_ahead(FormatList<Fs...>, const DecodeJob& job) {
  const AheadKernels* found = nullptr;
  const Format format = job.weight->packed.format;
  if (format == Format::kPlain && P::template in_units<Plain>(job))
    found = &kAhead<P, typename P::template Cursor<Plain>>;
  ((format == Fs::kFormat && P::template in_units<Fs>(job)
        ? void(found = &kAhead<P, typename P::template Cursor<Fs>>)
        : void()),
   ...);
  return found;
}

template <class P>
const AheadKernels* ahead(const DecodeJob& job) {
  return find_ahead<P>(PackedFormats{}, job);
}

template <class... Fs>
bool fill_any(FormatList<Fs...>, const PackedView& weight, CodeTables& tables) {
  return ((weight.format == Fs::kFormat && fill_tables<Fs, V>(weight, tables)) || ...);
}

bool prepare(const LinearWeight& weight, CodeTables& tables) {
  return fill_any(PackedFormats{}, weight.packed, tables);
}

template <class P>
DecodeFn* decoder(Format format) {
  return find_decoder(PackedFormats{}, format,
                      []<class F>() -> DecodeFn* { return P::template kDecode<F>; });
}

void enter() { V::configure(); }
void leave() { V::release(); }

template <class P, std::size_t kChunk>
constexpr LinearKernels kernels(std::size_t load_chunks = kAnyChunks, std::size_t pass_rows = 0) {
  static_assert(most_squares(P::kPanel, kChunk) <= kMostSquares);
  static_assert(most_squares(kChunk, P::kPanel) <= kMostSquares);
  return {.block = 32,
          .panel = P::kPanel,
          .step = 32,
          .chunk = kChunk,
          .left_bytes = 2,
          .panel_step_bytes = P::kStep,
          .pack = P::pack,
          .multiply = multiply<P>,
          .decoder = decoder<P>,
          .finish = P::finish,
          .load_chunks = load_chunks,
          .pass_rows = pass_rows,
          .takes_tails = true,
          .enter = enter,
          .leave = leave,
          .prepare = prepare,
          .ahead = ahead<P>};
}

template <class... Fs>
DirectFn* find_direct(FormatList<Fs...>, const DecodeJob& job) {
  DirectFn* found = nullptr;
  ((job.weight->packed.format == Fs::kFormat && in_pairs_of_groups<Fs>(job, job.begin | job.count)
        ? void(found = multiply_few<Fs, V, 128>)
        : void()),
   ...);
  return found;
}

DirectFn* direct(const DecodeJob& job) { return find_direct(PackedFormats{}, job); }

constexpr LinearKernels with_direct(LinearKernels kernels) {
  kernels.direct = direct;
  kernels.takes_tails = false;
  return kernels;
}

constexpr LinearKernels with_few(LinearKernels many, const LinearKernels* few) {
  many.few_rows = 16;
  many.few = few;
  return many;
}

// A block of the left operand, 32 KiB, stays in the first-level cache while the panel streams by.
constexpr LinearKernels kFewForward = with_direct(kernels<Forward<128>, 2048>());
constexpr LinearKernels kForward = with_few(kernels<Forward<128>, 512>(), &kFewForward);
// For few rows the weight must come from memory as fast as it can: wide pieces of its rows, 256
// rows at a time, so that the next panel finds its lines and pages near the last one's. 1.25x
// faster for one token.
constexpr LinearKernels kFewDx = kernels<Dx<256>, 256>(/*load_chunks=*/1);
// A panel is a line of each row of the weight: 512 rows of the left operand at a time fetch and
// decode it half as often as 256. 1.2x faster, where forward gains nothing.
constexpr LinearKernels kDx =
    with_few(kernels<Dx<128>, 512>(kAnyChunks, /*pass_rows=*/512), &kFewDx);
static_assert(kForward.has_sizes() && kFewForward.has_sizes() && kDx.has_sizes() &&
              kFewDx.has_sizes());

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
