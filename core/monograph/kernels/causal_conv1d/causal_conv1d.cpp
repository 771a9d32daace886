// The variant list and the parallel driver; no intrinsics here.
#include "monograph/kernels/causal_conv1d/causal_conv1d.h"

#include <algorithm>
#include <cstring>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/documents/documents.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
const ConvKernels* causal_conv1d_variant(DType dtype);

namespace {

// Elements a thread takes at least: some 10 microseconds of work.
constexpr std::size_t kGrain = 16384;
// Tiles of a piece at least, and pieces whose sums are kept at most. Both depend on the documents
// alone.
constexpr std::size_t kLeastTiles = 4, kMostPieces = 64;

const ConvKernels& pick_conv(DType dtype) {
  const ConvKernels* kernels = pick(causal_conv1d_variants(), dtype);
  if (kernels == nullptr) throw Error("causal_conv1d: no variant for this type");
  return *kernels;
}

std::size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

std::vector<ConvTile> tiles_of(const char* kernel, const ConvProblem& problem) {
  check_offsets(kernel, "cu", problem.offsets, problem.documents, problem.tokens);
  std::vector<ConvTile> tiles;
  for (std::size_t n = 0; n < problem.documents; ++n) {
    const auto first = static_cast<std::size_t>(problem.offsets[n]);
    const auto last = static_cast<std::size_t>(problem.offsets[n + 1]);
    for (std::size_t t = first; t < last; t += kConvTile)
      tiles.push_back({n, t, std::min(t + kConvTile, last), first, last});
  }
  return tiles;
}

// Tiles and channels as units of work: run(piece, first tile, tiles, from, to).
template <class Run>
void each_unit(const ConvProblem& problem, std::size_t tiles, std::size_t piece,
               ParallelFor parallel_for, const Run& run) {
  if (tiles == 0) return;
  const std::size_t pieces = (tiles + piece - 1) / piece;
  const std::size_t strips = (problem.channels + kConvStrip - 1) / kConvStrip;
  const std::size_t unit =
      std::max<std::size_t>(1, problem.tokens * problem.channels / (pieces * strips));
  const std::size_t grain = std::max<std::size_t>(1, kGrain / unit);
  parallel_for(pieces * strips, grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t first = i / strips * piece, from = i % strips * kConvStrip;
      run(i / strips, first, std::min(piece, tiles - first), from,
          std::min(from + kConvStrip, problem.channels));
    }
  });
}

// 0 in the tokens outside documents.
void clear_gaps(const ConvProblem& problem, void* rows, ParallelFor parallel_for) {
  const std::size_t bytes = problem.channels * size_of(problem.dtype);
  const auto clear = [&](std::size_t begin, std::size_t end) {
    if (begin == end) return;
    parallel_for(end - begin, std::max<std::size_t>(1, kGrain / problem.channels),
                 [&](std::size_t from, std::size_t to) {
                   std::memset(static_cast<std::byte*>(rows) + (begin + from) * bytes, 0,
                               (to - from) * bytes);
                 });
  };
  const auto first = static_cast<std::size_t>(problem.offsets[0]);
  const auto last = static_cast<std::size_t>(problem.offsets[problem.documents]);
  clear(0, first);
  clear(last, problem.tokens);
}

// The last taps - 1 inputs of every document.
template <class T>
void keep_states(const ConvForward& job, ParallelFor parallel_for) {
  const ConvProblem& problem = job.problem;
  const std::size_t past = problem.taps - 1;
  const T* x = static_cast<const T*>(problem.x.data);
  const T* state = static_cast<const T*>(problem.state);
  T* final_state = static_cast<T*>(job.final_state);
  parallel_for(
      problem.documents * problem.channels, kGrain, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
          const std::size_t n = i / problem.channels, c = i % problem.channels;
          const auto last = static_cast<std::size_t>(problem.offsets[n + 1]);
          const std::size_t length = last - static_cast<std::size_t>(problem.offsets[n]);
          for (std::size_t e = 0; e < past; ++e) {
            T& out = final_state[i * past + e];
            if (length + e >= past)
              out = x[(last + e - past) * problem.x.token_stride + c * problem.x.channel_stride];
            else
              out = state == nullptr ? T{} : state[i * past + e + length];
          }
        }
      });
}

// The state of a document without tokens is its final state.
void pass_empty_documents(const ConvBackward& job) {
  const ConvProblem& problem = job.problem;
  const std::size_t bytes = problem.channels * (problem.taps - 1) * size_of(problem.dtype);
  if (bytes == 0) return;
  for (std::size_t n = 0; n < problem.documents; ++n) {
    if (problem.offsets[n] != problem.offsets[n + 1]) continue;
    std::byte* const out = static_cast<std::byte*>(job.dstate) + n * bytes;
    if (job.dfinal == nullptr)
      std::memset(out, 0, bytes);
    else
      std::memcpy(out, static_cast<const std::byte*>(job.dfinal) + n * bytes, bytes);
  }
}

// The partial sums [pieces][taps + 1][channels], in order.
void add_pieces(const ConvBackward& job, const std::vector<float>& partial, std::size_t pieces,
                ParallelFor parallel_for) {
  const std::size_t channels = job.problem.channels, taps = job.problem.taps;
  parallel_for(channels, std::max<std::size_t>(1, kGrain / ((taps + 1) * (pieces + 1))),
               [&](std::size_t begin, std::size_t end) {
                 for (std::size_t j = 0; j <= taps; ++j)
                   for (std::size_t c = begin; c < end; ++c) {
                     float sum = 0.f;
                     for (std::size_t p = 0; p < pieces; ++p)
                       sum += partial[(p * (taps + 1) + j) * channels + c];
                     if (j < taps && job.dweight != nullptr) job.dweight[c * taps + j] = sum;
                     if (j == taps && job.dbias != nullptr) job.dbias[c] = sum;
                   }
               });
}

}  // namespace

const std::vector<Variant<const ConvKernels, ByDType>>& causal_conv1d_variants() {
  static const auto rows = make_variants<const ConvKernels>(
      VectorTargets{}, every_dtype(),
      []<class V>(ByDType key) { return causal_conv1d_variant<V>(key.dtype); });
  return rows;
}

void causal_conv1d(const ConvForward& job, ParallelFor parallel_for) {
  const ConvProblem& problem = job.problem;
  const ConvKernels& kernels = pick_conv(problem.dtype);
  const std::vector<ConvTile> tiles = tiles_of("causal_conv1d", problem);
  each_unit(problem, tiles.size(), kLeastTiles, parallel_for,
            [&](std::size_t, std::size_t first, std::size_t count, std::size_t from,
                std::size_t to) { kernels.forward(job, tiles.data() + first, count, from, to); });
  clear_gaps(problem, job.y, parallel_for);
  if (job.final_state != nullptr && problem.taps > 1)
    with_type(problem.dtype, [&]<class T>() { keep_states<T>(job, parallel_for); });
}

void causal_conv1d_backward(const ConvBackward& job, ParallelFor parallel_for) {
  const ConvProblem& problem = job.problem;
  const ConvKernels& kernels = pick_conv(problem.dtype);
  const std::vector<ConvTile> tiles = tiles_of("causal_conv1d_backward", problem);
  const std::size_t piece = std::max(kLeastTiles, (tiles.size() + kMostPieces - 1) / kMostPieces);
  const std::size_t pieces = (tiles.size() + piece - 1) / piece;
  const bool summed = job.dweight != nullptr || job.dbias != nullptr;
  const std::size_t size = (problem.taps + 1) * problem.channels;
  std::vector<float> partial(summed ? pieces * size : 0);
  each_unit(
      problem, tiles.size(), piece, parallel_for,
      [&](std::size_t p, std::size_t first, std::size_t count, std::size_t from, std::size_t to) {
        kernels.backward(job, tiles.data() + first, count, from, to,
                         summed ? partial.data() + p * size : nullptr);
      });
  if (summed) add_pieces(job, partial, pieces, parallel_for);
  if (job.dx != nullptr) clear_gaps(problem, job.dx, parallel_for);
  if (job.dstate != nullptr) pass_empty_documents(job);
}

}  // namespace monograph
