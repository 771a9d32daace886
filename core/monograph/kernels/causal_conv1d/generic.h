// Tiles of tokens and 64 channels, once for every SIMD vocabulary: loaded into fp32 buffers in
// which a token is a row, whatever the layout; all arithmetic is between such rows.
#pragma once

#include "monograph/base/float_types.h"
#include "monograph/kernels/causal_conv1d/causal_conv1d.h"
#include "monograph/kernels/gated_activation/activations.h"
#include "monograph/simd/row_walk.h"

namespace monograph {

inline constexpr std::size_t kConvRow = kRowBlock;       // channels of a buffer's row
inline constexpr std::size_t kConvPast = kMostTaps - 1;  // tokens before and behind a tile
inline constexpr std::size_t kConvRows = kConvTile + 2 * kConvPast;

// Elements data[i * stride] of `columns` consecutive places each, i < count, as columns of the
// rows: where tokens are innermost. An instruction set with a transpose specialises it.
template <class V>
struct ConvTranspose {
  template <class T>
  [[gnu::noinline]] static void load(const T* data, std::size_t stride, std::size_t tokens,
                                     std::size_t channels, float* rows) {
    for (std::size_t c = 0; c < channels; ++c)
      for (std::size_t t = 0; t < tokens; ++t)
        rows[t * kConvRow + c] = to_float(data[c * stride + t]);
  }
};

// What knows no storage type.
template <class V>
struct ConvRows {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  using W = RowWalk<V>;
  static constexpr std::size_t kLanes = L::kLanes;

  // Weights of 64 channels: [taps + 1][kConvRow], the bias last.
  using Weights = const float*;

  // out[r] = bias + sum over j of w[j] x[r + j]
  template <std::size_t kTaps>
  [[gnu::noinline]] static void sums(const float* x, Weights w, std::size_t rows, float* out) {
    for (std::size_t k = 0; k < kConvRow; k += kLanes) {
      F32 taps[kTaps];
      for (std::size_t j = 0; j < kTaps; ++j) taps[j] = L::load(w + j * kConvRow + k);
      const F32 bias = L::load(w + kTaps * kConvRow + k);
      for (std::size_t r = 0; r < rows; ++r) {
        F32 sum = bias;
        for (std::size_t j = 0; j < kTaps; ++j)
          sum = L::fused(taps[j], L::load(x + (r + j) * kConvRow + k), sum);
        L::store(out + r * kConvRow + k, sum);
      }
    }
  }
  // out[r] = sum over i of w[taps - 1 - i] d[r + i]
  template <std::size_t kTaps>
  [[gnu::noinline]] static void back(const float* d, Weights w, std::size_t rows, float* out) {
    for (std::size_t k = 0; k < kConvRow; k += kLanes) {
      F32 taps[kTaps];
      for (std::size_t j = 0; j < kTaps; ++j) taps[j] = L::load(w + j * kConvRow + k);
      for (std::size_t r = 0; r < rows; ++r) {
        F32 sum = L::set(0.f);
        for (std::size_t i = 0; i < kTaps; ++i)
          sum = L::fused(taps[kTaps - 1 - i], L::load(d + (r + i) * kConvRow + k), sum);
        L::store(out + r * kConvRow + k, sum);
      }
    }
  }
  // into[j] += sum over r of d[r] x[r + j], and d[r] itself into the row of the bias; rows of
  // `into` are kConvRow wide.
  template <std::size_t kTaps>
  [[gnu::noinline]] static void products(const float* d, const float* x, std::size_t rows,
                                         float* into) {
    for (std::size_t k = 0; k < kConvRow; k += kLanes) {
      F32 taps[kTaps], bias = L::load(into + kTaps * kConvRow + k);
      for (std::size_t j = 0; j < kTaps; ++j) taps[j] = L::load(into + j * kConvRow + k);
      for (std::size_t r = 0; r < rows; ++r) {
        const F32 value = L::load(d + r * kConvRow + k);
        for (std::size_t j = 0; j < kTaps; ++j)
          taps[j] = L::fused(value, L::load(x + (r + j) * kConvRow + k), taps[j]);
        bias = L::add(bias, value);
      }
      for (std::size_t j = 0; j < kTaps; ++j) L::store(into + j * kConvRow + k, taps[j]);
      L::store(into + kTaps * kConvRow + k, bias);
    }
  }
  [[gnu::noinline]] static void clear(float* rows, std::size_t count) {
    for (std::size_t i = 0; i < count * kConvRow; i += kLanes) L::store(rows + i, L::set(0.f));
  }
};

struct ConvSteps {
  void (*sums)(const float* x, const float* w, std::size_t rows, float* out);
  void (*back)(const float* d, const float* w, std::size_t rows, float* out);
  void (*products)(const float* d, const float* x, std::size_t rows, float* into);
};

template <class V>
inline constexpr ConvSteps kConvSteps[kMostTaps] = {
    {ConvRows<V>::template sums<1>, ConvRows<V>::template back<1>,
     ConvRows<V>::template products<1>},
    {ConvRows<V>::template sums<2>, ConvRows<V>::template back<2>,
     ConvRows<V>::template products<2>},
    {ConvRows<V>::template sums<3>, ConvRows<V>::template back<3>,
     ConvRows<V>::template products<3>},
    {ConvRows<V>::template sums<4>, ConvRows<V>::template back<4>,
     ConvRows<V>::template products<4>},
    {ConvRows<V>::template sums<5>, ConvRows<V>::template back<5>,
     ConvRows<V>::template products<5>},
    {ConvRows<V>::template sums<6>, ConvRows<V>::template back<6>,
     ConvRows<V>::template products<6>},
    {ConvRows<V>::template sums<7>, ConvRows<V>::template back<7>,
     ConvRows<V>::template products<7>},
    {ConvRows<V>::template sums<8>, ConvRows<V>::template back<8>,
     ConvRows<V>::template products<8>}};

template <class V, class T>
struct ConvTiles {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  using W = RowWalk<V>;
  using Rows = ConvRows<V>;

  // Tokens [begin, end), channels [from, from + count), and zeros up to kConvRow. The lines that
  // the next channels of the same tokens need are asked for: no prefetcher sees so short runs.
  [[gnu::noinline]] static void load(const TokensView& view, std::size_t begin, std::size_t end,
                                     std::size_t from, std::size_t count, float* rows) {
    const T* data =
        static_cast<const T*>(view.data) + begin * view.token_stride + from * view.channel_stride;
    if (view.channel_stride != 1) {
      if (count < kConvRow) Rows::clear(rows, end - begin);
      return ConvTranspose<V>::load(data, view.channel_stride, end - begin, count, rows);
    }
    for (std::size_t t = begin; t < end; ++t, data += view.token_stride, rows += kConvRow) {
      if (count == kConvRow) {
        for (std::size_t line = 0; line < kConvRow * sizeof(T); line += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(data + kConvRow) + line);
        W::each_of_block([&](std::size_t k) __attribute__((always_inline)) {
          L::store(rows + k * L::kLanes, L::load_as(data + k * L::kLanes));
        });
      } else {
        for (std::size_t c = 0; c < kConvRow; ++c) rows[c] = c < count ? to_float(data[c]) : 0.f;
      }
    }
  }
  // The inputs of `tile` from the token `begin` on, which may lie before the document, to `end`.
  [[gnu::noinline]] static void load_inputs(const ConvProblem& problem, const ConvTile& tile,
                                            std::size_t end, std::size_t from, std::size_t count,
                                            float* rows) {
    const std::size_t past = problem.taps - 1, inside = tile.begin - tile.first;
    const std::size_t before = inside < past ? past - inside : 0;
    if (before > 0) {
      Rows::clear(rows, before);
      const T* state = static_cast<const T*>(problem.state);
      if (state != nullptr) {
        state += (tile.document * problem.channels + from) * past + (past - before);
        for (std::size_t c = 0; c < count; ++c)
          for (std::size_t i = 0; i < before; ++i)
            rows[i * kConvRow + c] = to_float(state[c * past + i]);
      }
    }
    load(problem.x, tile.begin + before - past, end, from, count, rows + before * kConvRow);
  }
  [[gnu::noinline]] static void load_weights(const ConvProblem& problem, std::size_t from,
                                             std::size_t count, float* w) {
    Rows::clear(w, problem.taps + 1);
    const auto fill = [&]<class U>(const U* weight) __attribute__((always_inline)) {
      for (std::size_t c = 0; c < count; ++c)
        for (std::size_t j = 0; j < problem.taps; ++j)
          w[j * kConvRow + c] = to_float(weight[(from + c) * problem.taps + j]);
    };
    const auto fill_bias = [&]<class U>(const U* bias) __attribute__((always_inline)) {
      for (std::size_t c = 0; c < count; ++c)
        w[problem.taps * kConvRow + c] = to_float(bias[from + c]);
    };
    if (problem.weight_dtype == dtype_of<T>)
      fill(static_cast<const T*>(problem.weight));
    else
      fill(static_cast<const float*>(problem.weight));
    if (problem.bias == nullptr) return;
    if (problem.bias_dtype == dtype_of<T>)
      fill_bias(static_cast<const T*>(problem.bias));
    else
      fill_bias(static_cast<const float*>(problem.bias));
  }
  // Rows to y[tokens, channels].
  template <bool kSilu>
  [[gnu::noinline]] static void store(const float* rows, std::size_t count, T* y,
                                      std::size_t stride, std::size_t channels) {
    for (std::size_t r = 0; r < count; ++r, rows += kConvRow, y += stride)
      W::each_alone(
          channels, [&](std::size_t c, std::size_t n) __attribute__((always_inline)) {
            F32 v = L::load(rows + c);
            if constexpr (kSilu) v = Silu<V>::template value<T>(v);
            W::store(y + c, v, n);
          });
  }
  // d = dy act'(s), over s.
  [[gnu::noinline]] static void slopes(float* s, const float* dy, std::size_t count) {
    for (std::size_t i = 0; i < count * kConvRow; i += L::kLanes)
      L::store(s + i,
               L::mul(L::load(dy + i), Silu<V>::template with_slope<T>(L::load(s + i)).slope));
  }
  // rows[e - begin] += dfinal for the places e of the final state, up to `end`; places before the
  // document count too. Places are shifted by `past`.
  [[gnu::noinline]] static void add_final(const ConvBackward& job, const ConvTile& tile,
                                          std::size_t begin, std::size_t end, std::size_t from,
                                          std::size_t count, float* rows) {
    const std::size_t past = job.problem.taps - 1;
    const T* dfinal =
        static_cast<const T*>(job.dfinal) + (tile.document * job.problem.channels + from) * past;
    const std::size_t least = begin > tile.last ? begin : tile.last;
    for (std::size_t e = least; e < end; ++e)
      for (std::size_t c = 0; c < count; ++c)
        rows[(e - begin) * kConvRow + c] += to_float(dfinal[c * past + (e - tile.last)]);
  }
  [[gnu::noinline]] static void store_state(const ConvBackward& job, const ConvTile& tile,
                                            std::size_t from, std::size_t count,
                                            const float* rows) {
    const std::size_t past = job.problem.taps - 1;
    T* dstate = static_cast<T*>(job.dstate) + (tile.document * job.problem.channels + from) * past;
    for (std::size_t c = 0; c < count; ++c)
      for (std::size_t i = 0; i < past; ++i)
        dstate[c * past + i] = from_float<T>(rows[i * kConvRow + c]);
  }

  static void forward(const ConvForward& job, const ConvTile* tiles, std::size_t count,
                      std::size_t from, std::size_t to) {
    const ConvProblem& problem = job.problem;
    const ConvSteps& steps = kConvSteps<V>[problem.taps - 1];
    alignas(64) float w[kConvStrip / kConvRow][(kMostTaps + 1) * kConvRow];
    alignas(64) float x[(kConvTile + kConvPast) * kConvRow], s[kConvTile * kConvRow];
    for (std::size_t c = from, i = 0; c < to; c += kConvRow, ++i)
      load_weights(problem, c, to - c < kConvRow ? to - c : kConvRow, w[i]);
    for (const ConvTile* tile = tiles; tile < tiles + count; ++tile)
      for (std::size_t c = from, i = 0; c < to; c += kConvRow, ++i) {
        const std::size_t width = to - c < kConvRow ? to - c : kConvRow;
        const std::size_t rows = tile->end - tile->begin;
        load_inputs(problem, *tile, tile->end, c, width, x);
        steps.sums(x, w[i], rows, s);
        T* y = static_cast<T*>(job.y) + tile->begin * problem.channels + c;
        (problem.silu ? store<true> : store<false>)(s, rows, y, problem.channels, width);
      }
  }

  static void backward(const ConvBackward& job, const ConvTile* tiles, std::size_t count,
                       std::size_t from, std::size_t to, float* sums) {
    const ConvProblem& problem = job.problem;
    const ConvSteps& steps = kConvSteps<V>[problem.taps - 1];
    const std::size_t past = problem.taps - 1;
    alignas(64) float w[kConvStrip / kConvRow][(kMostTaps + 1) * kConvRow];
    alignas(64) float x[kConvRows * kConvRow], d[kConvRows * kConvRow], dy[kConvRows * kConvRow];
    alignas(64) float total[(kMostTaps + 1) * kConvRow];
    for (std::size_t c = from, i = 0; c < to; c += kConvRow, ++i)
      load_weights(problem, c, to - c < kConvRow ? to - c : kConvRow, w[i]);
    for (const ConvTile* tile = tiles; tile < tiles + count; ++tile)
      for (std::size_t c = from, i = 0; c < to; c += kConvRow, ++i) {
        const std::size_t width = to - c < kConvRow ? to - c : kConvRow;
        const std::size_t rows = tile->end - tile->begin;
        // The gradients of tokens behind the tile, in the same document.
        const std::size_t end = tile->end + past < tile->last ? tile->end + past : tile->last;
        const std::size_t there = end - tile->begin;
        // Row `past` of d is the tile's first token; before it zeros, for the state.
        float* const first = d + past * kConvRow;
        if (problem.silu || sums != nullptr) load_inputs(problem, *tile, end, c, width, x);
        if (problem.silu) {
          steps.sums(x, w[i], there, first);
          load(job.dy, tile->begin, end, c, width, dy);
          slopes(first, dy, there);
        } else {
          load(job.dy, tile->begin, end, c, width, first);
        }
        if (sums != nullptr) {
          for (std::size_t j = 0; j <= problem.taps; ++j)
            for (std::size_t k = 0; k < kConvRow; ++k)
              total[j * kConvRow + k] = k < width ? sums[j * problem.channels + c + k] : 0.f;
          steps.products(first, x, rows, total);
          for (std::size_t j = 0; j <= problem.taps; ++j)
            for (std::size_t k = 0; k < width; ++k)
              sums[j * problem.channels + c + k] = total[j * kConvRow + k];
        }
        Rows::clear(first + there * kConvRow, rows + past - there);
        // Inputs from `begin` on, places shifted by `past`: those of the state first.
        const bool state = job.dstate != nullptr && tile->begin == tile->first && past > 0;
        if (job.dx == nullptr && !state) continue;
        const std::size_t before = state ? past : 0;
        if (state) Rows::clear(d, past);
        steps.back(first - before * kConvRow, w[i], rows + before, x);
        if (job.dfinal != nullptr)
          add_final(job, *tile, tile->begin + past - before, tile->end + past, c, width, x);
        if (state) store_state(job, *tile, c, width, x);
        if (job.dx == nullptr) continue;
        T* dx = static_cast<T*>(job.dx) + tile->begin * problem.channels + c;
        store<false>(x + before * kConvRow, rows, dx, problem.channels, width);
      }
  }
};

template <class V, class T>
inline constexpr ConvKernels kConvKernels = {ConvTiles<V, T>::forward, ConvTiles<V, T>::backward};

template <class V>
const ConvKernels* causal_conv1d_variant(DType dtype) {
  return with_type(
      dtype, [&]<class T>() __attribute__((always_inline))->const ConvKernels* {
        return &kConvKernels<V, T>;
      });
}

}  // namespace monograph
