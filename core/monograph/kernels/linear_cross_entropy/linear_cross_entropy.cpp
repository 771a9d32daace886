// The variant list and the two drivers. No intrinsics here.
#include "monograph/kernels/linear_cross_entropy/linear_cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/cpu/scratch.h"
#include "monograph/formats/slice.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
const CrossEntropyKernels* find_cross_entropy(DType dtype);

namespace {

// Chunks are whole blocks of the linear kernels where they can be.
constexpr std::size_t kRowUnit = 32;

const CrossEntropyKernels& pick_cross_entropy(DType dtype) {
  if (const CrossEntropyKernels* kernels = pick(cross_entropy_variants(), dtype)) return *kernels;
  throw Error(std::string("linear_cross_entropy: no variant for ") + name_of(dtype));
}

// `count` rows of `each` bytes in the fewest equal pieces of at most `limit` rows and `bytes`.
std::size_t piece_of(std::size_t count, std::size_t bytes, std::size_t each, std::size_t limit) {
  std::size_t most = std::clamp<std::size_t>(bytes / std::max<std::size_t>(each, 1), 1, limit);
  const std::size_t unit = most < kRowUnit ? 1 : kRowUnit;
  most = most / unit * unit;
  const std::size_t pieces = (count + most - 1) / most;
  const std::size_t piece = (count + pieces - 1) / std::max<std::size_t>(pieces, 1);
  return (piece + unit - 1) / unit * unit;
}

std::size_t aligned(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

std::byte* row_of(const MutableMatrix& m, std::size_t row, std::size_t element) {
  return static_cast<std::byte*>(m.data) + row * m.stride * element;
}
const std::byte* row_of(const Matrix& m, std::size_t row, std::size_t element) {
  return static_cast<const std::byte*>(m.data) + row * m.stride * element;
}

// The tokens whose label counts.
std::vector<std::size_t> counted(const CrossEntropyProblem& problem) {
  std::vector<std::size_t> rows;
  rows.reserve(problem.x.rows);
  for (std::size_t t = 0; t < problem.x.rows; ++t)
    if (problem.labels[t] != kIgnoredLabel) rows.push_back(t);
  return rows;
}

void gather(const Matrix& from, std::size_t element, const std::size_t* rows, std::size_t count,
            std::byte* to) {
  const std::size_t bytes = from.cols * element;
  for (std::size_t i = 0; i < count; ++i, to += bytes)
    std::memcpy(to, row_of(from, rows[i], element), bytes);
}

// Tokens in chunks: the logits of a chunk, what is to be done with each row of them, and dx from
// what the rows have become.
class ChunkedHead {
 public:
  ChunkedHead(const CrossEntropyProblem& problem, const MutableMatrix& dx,
              const ParallelFor& parallel_for)
      : kernels(pick_cross_entropy(problem.dtype)),
        p_(problem),
        dx_(dx),
        parallel_for_(parallel_for),
        element_(size_bytes(problem.dtype)),
        row_bytes_(problem.weight.packed.rows * element_),
        x_bytes_(problem.x.cols * element_) {}

  // run_row(token, logits) for each of `rows`; the others get dx 0.
  template <class RunRow>
  void run(const std::vector<std::size_t>& rows, std::size_t logits_bytes, RunRow run_row) {
    clear_others(rows);
    if (rows.empty()) return;
    const std::size_t chunk = piece_of(rows.size(), logits_bytes, row_bytes_, kChunkTokens);
    const bool gaps = rows.back() - rows.front() + 1 != rows.size();
    const std::size_t gathered = gaps ? aligned(chunk * x_bytes_) : 0;
    const Scratch scratch(ScratchUse::kLogits, aligned(chunk * row_bytes_) + 2 * gathered);
    logits_ = scratch.data();
    x_copy_ = logits_ + aligned(chunk * row_bytes_);
    dx_copy_ = x_copy_ + gathered;
    for (std::size_t i = 0; i < rows.size(); i += chunk)
      run_chunk(rows.data() + i, std::min(chunk, rows.size() - i), run_row);
  }

  LogitsRow row(std::size_t token, std::byte* logits) const {
    return {logits, p_.weight.packed.rows, static_cast<std::size_t>(p_.labels[token]), p_.map};
  }

  const CrossEntropyKernels& kernels;

 private:
  void clear_others(const std::vector<std::size_t>& rows) const {
    if (dx_.data == nullptr) return;
    std::size_t next = 0;
    for (std::size_t t = 0; t < p_.x.rows; ++t) {
      if (next < rows.size() && rows[next] == t)
        ++next;
      else
        std::memset(row_of(dx_, t, element_), 0, x_bytes_);
    }
  }

  template <class RunRow>
  void run_chunk(const std::size_t* rows, std::size_t count, RunRow& run_row) const {
    // Rows with gaps between them are brought together; the products see no difference.
    const bool gaps = rows[count - 1] - rows[0] + 1 != count;
    if (gaps) gather(p_.x, element_, rows, count, x_copy_);
    const Matrix x = gaps ? Matrix{x_copy_, count, p_.x.cols, p_.x.cols}
                          : Matrix{row_of(p_.x, rows[0], element_), count, p_.x.cols, p_.x.stride};
    const std::size_t vocabulary = p_.weight.packed.rows;
    const MutableMatrix logits = {logits_, count, vocabulary, vocabulary};
    const LinearOutput output = {p_.weight, {}, p_.bias, logits};
    linear(p_.dtype, x, {&output, 1}, parallel_for_);
    parallel_for_(count, 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) run_row(rows[i], logits_ + i * row_bytes_);
    });
    if (dx_.data == nullptr) return;
    const MutableMatrix dx =
        gaps ? MutableMatrix{dx_copy_, count, dx_.cols, dx_.cols}
             : MutableMatrix{row_of(dx_, rows[0], element_), count, dx_.cols, dx_.stride};
    const LinearTerm term = {{logits_, count, vocabulary, vocabulary}, p_.weight};
    linear_dx(p_.dtype, {&term, 1}, dx, parallel_for_);
    for (std::size_t i = 0; gaps && i < count; ++i)
      std::memcpy(row_of(dx_, rows[i], element_), dx_copy_ + i * x_bytes_, x_bytes_);
  }

  const CrossEntropyProblem& p_;
  const MutableMatrix dx_;
  const ParallelFor& parallel_for_;
  const std::size_t element_, row_bytes_, x_bytes_;
  std::byte* logits_ = nullptr;
  std::byte* x_copy_ = nullptr;
  std::byte* dx_copy_ = nullptr;
};

void clear_ignored(const CrossEntropyProblem& problem, const CrossEntropyResult& result) {
  for (std::size_t t = 0; t < problem.x.rows; ++t) {
    if (problem.labels[t] != kIgnoredLabel) continue;
    result.loss[t] = result.lse[t] = 0;
    if (const TokenStatistics* s = result.statistics) {
      s->entropy[t] = s->log_sum_squares[t] = s->mean[t] = 0;
      s->top[t] = false;
    }
  }
}

void write_statistics(const LogitsRow& row, const RowSums& sums, const RowStatistics& found,
                      std::size_t token, const TokenStatistics& out) {
  const double log_sum = std::log(sums.sum);
  out.entropy[token] = static_cast<float>(log_sum - found.weighted / sums.sum);
  out.log_sum_squares[token] = static_cast<float>(std::log(found.squares) - 2 * log_sum);
  out.mean[token] = static_cast<float>(found.total / static_cast<double>(row.count));
  out.top[token] = sums.label >= sums.peak && sums.label > found.before;
}

// out[c][r] = in[r][c], in squares that fit the first-level cache.
template <class T>
void transpose(const T* in, std::size_t rows, std::size_t cols, T* out,
               const ParallelFor& parallel_for) {
  constexpr std::size_t kSquare = 32;
  parallel_for((cols + kSquare - 1) / kSquare, 1, [&](std::size_t from, std::size_t to) {
    for (std::size_t r = 0; r < rows; r += kSquare)
      for (std::size_t c = from * kSquare; c < std::min(to * kSquare, cols); ++c)
        for (std::size_t i = r; i < std::min(r + kSquare, rows); ++i)
          out[c * rows + i] = in[i * cols + c];
  });
}

// One call of linear_cross_entropy_dw.
class SlicedWeightGradient {
 public:
  SlicedWeightGradient(const CrossEntropyProblem& problem,
                       const CrossEntropyWeightGradient& gradient, const ParallelFor& parallel_for)
      : p_(problem),
        gradient_(gradient),
        parallel_for_(parallel_for),
        kernels_(pick_cross_entropy(problem.dtype)),
        element_(size_bytes(problem.dtype)),
        rows_(counted(problem)) {}

  void run(std::size_t logits_bytes) {
    const std::size_t vocabulary = p_.weight.packed.rows, count = rows_.size();
    if (count == 0) return clear();
    const std::size_t slice = piece_of(vocabulary, logits_bytes / 2, count * element_, vocabulary);
    const bool copy = count != p_.x.rows || p_.x.stride != p_.x.cols;
    const std::size_t x_bytes = copy ? aligned(count * p_.x.cols * element_) : 0;
    const std::size_t half = aligned(slice * count * element_);
    const Scratch scratch(ScratchUse::kLogits, 2 * half + x_bytes);
    logits_ = scratch.data();
    transposed_ = logits_ + half;
    std::byte* x = transposed_ + half;
    if (copy) gather(p_.x, element_, rows_.data(), count, x);
    x_ = {copy ? x : p_.x.data, count, p_.x.cols, p_.x.cols};
    for (std::size_t v = 0; v < vocabulary; v += slice)
      run_slice(v, std::min(slice, vocabulary - v));
  }

 private:
  void clear() const {
    const MutableMatrix& dw = gradient_.dweight;
    for (std::size_t v = 0; v < dw.rows; ++v)
      std::memset(row_of(dw, v, element_), 0, dw.cols * element_);
    if (gradient_.dbias != nullptr) std::fill_n(gradient_.dbias, dw.rows, 0.f);
  }

  void run_slice(std::size_t first, std::size_t width) const {
    const LinearWeight weight = {slice_rows(p_.weight.packed, first, width), p_.weight.dtype};
    const std::byte* bias = static_cast<const std::byte*>(p_.bias);
    const LinearOutput output = {weight,
                                 {},
                                 bias == nullptr ? nullptr : bias + first * element_,
                                 {logits_, x_.rows, width, width}};
    linear(p_.dtype, x_, {&output, 1}, parallel_for_);
    parallel_for_(x_.rows, 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        const std::size_t token = rows_[i];
        const std::size_t label = static_cast<std::size_t>(p_.labels[token]);
        const bool here = label >= first && label < first + width;
        kernels_.gradient(
            {logits_ + i * width * element_, width, here ? label - first : kNoLabel, p_.map},
            gradient_.lse[token], 1.f, gradient_.g[token]);
      }
    });
    with_type(p_.dtype, [&]<class T>() {
      T* const transposed = reinterpret_cast<T*>(transposed_);
      transpose(reinterpret_cast<const T*>(logits_), x_.rows, width, transposed, parallel_for_);
      if (gradient_.dbias == nullptr) return;
      for (std::size_t v = 0; v < width; ++v) {
        double sum = 0;
        for (std::size_t i = 0; i < x_.rows; ++i)
          sum += static_cast<double>(to_float(transposed[v * x_.rows + i]));
        gradient_.dbias[first + v] = static_cast<float>(sum);
      }
    });
    LinearTerm term = {{transposed_, width, x_.rows, x_.rows}, {}};
    term.weight.dtype = p_.dtype;
    term.weight.packed.rows = x_.rows;
    term.weight.packed.cols = x_.cols;
    term.weight.packed.values = static_cast<const std::uint8_t*>(x_.data);
    const MutableMatrix& dw = gradient_.dweight;
    linear_dx(p_.dtype, {&term, 1}, {row_of(dw, first, element_), width, dw.cols, dw.stride},
              parallel_for_);
  }

  const CrossEntropyProblem& p_;
  const CrossEntropyWeightGradient& gradient_;
  const ParallelFor& parallel_for_;
  const CrossEntropyKernels& kernels_;
  const std::size_t element_;
  const std::vector<std::size_t> rows_;
  Matrix x_;
  std::byte* logits_ = nullptr;
  std::byte* transposed_ = nullptr;
};

}  // namespace

const std::vector<CrossEntropyVariant>& cross_entropy_variants() {
  static const auto rows = make_variants<const CrossEntropyKernels>(
      VectorTargets{}, every_dtype(),
      []<class V>(ByDType key) { return find_cross_entropy<V>(key.dtype); });
  return rows;
}

void linear_cross_entropy(const CrossEntropyProblem& problem, const CrossEntropyResult& result,
                          ParallelFor parallel_for, std::size_t logits_bytes) {
  clear_ignored(problem, result);
  ChunkedHead head(problem, result.dx, parallel_for);
  head.run(counted(problem), logits_bytes, [&](std::size_t token, std::byte* logits) {
    const LogitsRow row = head.row(token, logits);
    const RowSums sums = head.kernels.sums(row);
    const double log_sum = std::log(sums.sum), peak = sums.peak;
    result.loss[token] = static_cast<float>(log_sum + (peak - sums.label));
    result.lse[token] = static_cast<float>(log_sum + peak);
    if (result.statistics != nullptr)
      write_statistics(row, sums, head.kernels.statistics(row, sums.peak), token,
                       *result.statistics);
    if (result.dx.data != nullptr)
      head.kernels.gradient(row, sums.peak, static_cast<float>(1 / sums.sum), 1.f);
  });
}

void linear_entropy_dx(const CrossEntropyProblem& problem, const EntropyGradient& gradient,
                       ParallelFor parallel_for, std::size_t logits_bytes) {
  std::vector<std::size_t> rows = counted(problem);
  std::erase_if(rows, [&](std::size_t t) { return gradient.g[t] == 0; });
  ChunkedHead head(problem, gradient.dx, parallel_for);
  head.run(rows, logits_bytes, [&](std::size_t token, std::byte* logits) {
    head.kernels.entropy_gradient(head.row(token, logits), gradient.lse[token],
                                  gradient.entropy[token], gradient.g[token]);
  });
}

void linear_cross_entropy_dw(const CrossEntropyProblem& problem,
                             const CrossEntropyWeightGradient& gradient, ParallelFor parallel_for,
                             std::size_t logits_bytes) {
  SlicedWeightGradient(problem, gradient, parallel_for).run(logits_bytes);
}

}  // namespace monograph
