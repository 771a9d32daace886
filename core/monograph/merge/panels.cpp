#include "monograph/merge/panels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/kernels/low_rank/low_rank.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using safetensors::StoredDType;

// 512 kB of fp64: with base and output it stays in the second cache.
constexpr std::size_t kPanelElements = 65'536;
// Sums over panels are kept apart in this many pieces, whatever the number of threads.
constexpr std::size_t kPieces = 64;

template <class T>
double load_as(const std::uint8_t* bytes, std::size_t index) {
  T value;
  std::memcpy(&value, bytes + index * sizeof value, sizeof value);
  return to_float(value);
}

double load(StoredDType dtype, const std::uint8_t* bytes, std::size_t index) {
  if (dtype == StoredDType::kF32) return load_as<float>(bytes, index);
  if (dtype == StoredDType::kBF16) return load_as<Bf16>(bytes, index);
  return load_as<Fp16>(bytes, index);
}

// Elements of the factors of one expert: rank k of A at input i, of B at output o.
double of_a(const LowRankChange& change, std::size_t expert, std::size_t k, std::size_t i) {
  const LowRank& lora = *change.lora;
  return load(lora.a->dtype, lora.a_bytes, (expert * change.rank + k) * lora.a->shape[1] + i);
}
double of_b(const LowRankChange& change, std::size_t expert, std::size_t k, std::size_t o) {
  const LowRank& lora = *change.lora;
  return load(lora.b->dtype, lora.b_bytes, o * lora.b->shape[1] + k * change.experts + expert);
}

double sum_of_squares(const double* values, std::size_t count) {
  // Eight chains: the order is part of the result and the same everywhere.
  double sums[8] = {};
  std::size_t j = 0;
  for (; j + 8 <= count; j += 8) {
    for (std::size_t lane = 0; lane < 8; ++lane) {
      sums[lane] += values[j + lane] * values[j + lane];
    }
  }
  for (; j < count; ++j) sums[j % 8] += values[j] * values[j];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace

std::vector<ExpertRange> merged_ranges(const MergedWeight& weight) {
  const auto shares_offset = [](const std::optional<Conversion>& conversion) {
    return conversion && conversion->double_quant;
  };
  const bool whole = shares_offset(weight.base_as) || shares_offset(weight.packed);
  if (weight.experts == 0 || whole) return {{0, weight.experts}};
  std::vector<ExpertRange> ranges;
  for (std::size_t expert = 0; expert < weight.experts; ++expert) ranges.push_back({expert, 1});
  return ranges;
}

MergedPanels::MergedPanels(const MergedWeight& weight, ExpertRange range, ParallelFor parallel_for,
                           std::size_t multiple, std::size_t least_rows)
    : weight_(weight), range_(range) {
  const std::vector<std::uint64_t>& shape = weight.shape;
  cols_ = shape.empty() ? 1 : shape.back();
  matrix_rows_ = cols_ == 0 ? 0 : weight.elements() / cols_;
  if (weight.experts != 0) {
    if (!weight.members.empty()) of_expert_ = weight.members.size() / weight.experts;
    matrix_rows_ /= weight.experts * of_expert_;
    matrices_ = range.count * of_expert_;
    first_matrix_ = range.first * of_expert_;
  }
  // Groups of four rows suit the kernel; what `multiple` needs comes first.
  const std::size_t step = multiple / std::gcd(std::max<std::size_t>(cols_, 1), multiple);
  const std::size_t fitting = kPanelElements / std::max<std::size_t>(cols_, 1);
  const std::size_t four = std::lcm(step, std::size_t{4});
  panel_rows_ = fitting >= four ? fitting / four * four : step;
  panel_rows_ = std::max(panel_rows_, (least_rows + step - 1) / step * step);
  if (weight.base_as) quantize_base(parallel_for);
  for (const LowRankChange& change : weight.low_rank) {
    terms_.push_back({&change, {}});
    if (range.count <= 1)
      terms_.back().right = unpack_right(change, change.first_expert + range.first);
  }
  if (terms_.empty() || weight.low_rank.front().lora->magnitude == nullptr) return;
  const LowRank& lora = *weight.low_rank.front().lora;
  magnitude_.resize(lora.magnitude->elements);
  for (std::size_t i = 0; i < magnitude_.size(); ++i) {
    magnitude_[i] = load(lora.magnitude->dtype, lora.magnitude_bytes, i);
  }
  if (weight.low_rank.front().transposed) find_column_factors(parallel_for);
}

// right[k, j]: A[k, j], or B[j, k] where the weight is transposed.
std::vector<double> MergedPanels::unpack_right(const LowRankChange& change,
                                               std::size_t expert) const {
  const std::size_t rank = change.rank, tiles = (cols_ + kLowRankTile - 1) / kLowRankTile;
  std::vector<double> right(tiles * rank * kLowRankTile);
  for (std::size_t k = 0; k < rank; ++k) {
    for (std::size_t j = 0; j < cols_; ++j) {
      const std::size_t at = ((j / kLowRankTile) * rank + k) * kLowRankTile + j % kLowRankTile;
      right[at] = change.transposed ? of_b(change, expert, k, j) : of_a(change, expert, k, j);
    }
  }
  return right;
}

LowRankFactors MergedPanels::low_rank_factors(std::size_t matrix) const {
  LowRankFactors factors{matrix_rows_, cols_, 0, {}, {}};
  for (const Term& term : terms_) factors.rank += term.change->rank;
  factors.left.resize(factors.rows * factors.rank);
  factors.right.resize(factors.cols * factors.rank);
  matrix += first_matrix_;
  std::size_t at = 0;
  for (const Term& term : terms_) {
    const LowRankChange& change = *term.change;
    const std::size_t expert = change.first_expert + matrix / of_expert_;
    const std::size_t part = matrix % of_expert_ * matrix_rows_;
    for (std::size_t k = 0; k < change.rank; ++k, ++at) {
      for (std::size_t i = 0; i < factors.rows; ++i) {
        const std::size_t row = change.first_row + (part + i) * change.row_step;
        factors.left[i * factors.rank + at] =
            change.factor *
            (change.transposed ? of_a(change, expert, k, row) : of_b(change, expert, k, row));
      }
      for (std::size_t j = 0; j < factors.cols; ++j) {
        const double value =
            change.transposed ? of_b(change, expert, k, j) : of_a(change, expert, k, j);
        factors.right[j * factors.rank + at] =
            column_factors_.empty() ? value : value * column_factors_[j];
      }
    }
  }
  return factors;
}

void MergedPanels::quantize_base(ParallelFor parallel_for) {
  const Weight& from = *weight_.base_as->weight;
  const std::size_t experts = std::max<std::size_t>(weight_.experts, 1);
  const std::size_t cols = from.shape.empty() ? 1 : from.shape.back();
  const std::size_t rows = cols == 0 ? 0 : from.elements / cols / experts;
  const std::size_t before = range_.first * rows * cols;
  auto copy = std::make_unique<PackedCopy>(*weight_.base_as, std::max<std::size_t>(range_.count, 1),
                                           rows, cols);
  const PackedLayout& layout = copy->layout();
  const DType type = source_dtype(from);
  const std::size_t piece = layout.range(kPanelElements), matrix = layout.matrix_elements();
  const std::size_t pieces = ceil_div(matrix, piece);
  const auto each_piece = [&](auto&& body) {
    parallel_for(layout.matrices() * pieces, 1, [&](std::size_t index, std::size_t end) {
      std::vector<std::uint8_t> values(piece * size_bytes(type));
      for (; index < end; ++index) {
        const std::size_t begin = index / pieces * matrix;
        const std::size_t at = begin + index % pieces * piece;
        const std::size_t last = std::min(begin + matrix, at + piece);
        read_elements(from, before + at, before + last, type, values.data());
        body(index, at, values.data(), last - at);
      }
    });
  };
  if (copy->wants_largest()) {
    std::vector<float> largest(layout.matrices() * pieces);
    each_piece([&](std::size_t index, std::size_t, const void* values, std::size_t n) {
      largest[index] = largest_magnitude(type, values, n);
    });
    for (std::size_t i = 0; i < layout.matrices(); ++i) {
      float found = 0.0f;
      for (std::size_t p = 0; p < pieces; ++p) found = std::max(found, largest[i * pieces + p]);
      copy->set_largest(i, found);
    }
  }
  each_piece([&](std::size_t, std::size_t at, const void* values, std::size_t n) {
    copy->quantize(at, type, values, n);
  });
  copy->finish(parallel_for);
  packed_base_ = std::move(copy);
}

// Rows [first, last) of one matrix [inputs, outputs] from a packed copy of [outputs, inputs].
void MergedPanels::read_transposed(std::size_t first, std::size_t last, DType type,
                                   float* out) const {
  const std::size_t inputs = matrix_rows_, expert = first / inputs - range_.first;
  std::vector<float> run(last - first);
  for (std::size_t j = 0; j < cols_; ++j) {
    packed_base_->read(expert * cols_ + j, first % inputs, first % inputs + run.size(), type,
                       run.data());
    for (std::size_t i = 0; i < run.size(); ++i) out[i * cols_ + j] = run[i];
  }
}

void MergedPanels::read_base(std::size_t first, std::size_t last, std::vector<float>& base) const {
  base.resize((last - first) * cols_);
  if (weight_.new_rows != 0) {
    const std::size_t known = matrix_rows_ - weight_.new_rows;
    const std::size_t last_known = std::clamp(known, first, last);
    std::fill(base.begin() + static_cast<std::ptrdiff_t>((last_known - first) * cols_), base.end(),
              0.0f);
    last = last_known;
    if (first == last) return;
  }
  const std::size_t count = (last - first) * cols_;
  const Weight& from = *weight_.base;
  const std::uint64_t begin = std::uint64_t{first} * cols_;
  const DType type = source_dtype(from);
  if (packed_base_ && weight_.inputs_first) return read_transposed(first, last, type, base.data());
  if (packed_base_) {
    const std::size_t before = first_matrix_ * matrix_rows_;
    for (std::size_t i = first; i < last; ++i) {
      packed_base_->read(i - before, 0, cols_, type, base.data() + (i - first) * cols_);
    }
    return;
  }
  read_values(from, begin, begin + count, base.data());
}

void MergedPanels::start(std::size_t first, std::size_t last, const std::vector<float>& base,
                         std::vector<double>& merged) const {
  merged.resize((last - first) * cols_);
  if (weight_.replacement == nullptr) {
    std::copy(base.begin(), base.end(), merged.begin());
    return;
  }
  const StoredDType dtype = weight_.replacement->entry->dtype;
  const std::uint8_t* bytes = weight_.replacement->bytes().data();
  for (std::size_t i = 0; i < merged.size(); ++i) merged[i] = load(dtype, bytes, first * cols_ + i);
}

void MergedPanels::add_terms(std::size_t first, std::size_t last,
                             std::vector<double>& merged) const {
  std::vector<double> left, own;
  const std::size_t matrix = first / matrix_rows_;
  // Of a stack that is stored one by one, gate and up are two matrices of one expert.
  const std::size_t before = matrix * matrix_rows_, part = matrix % of_expert_ * matrix_rows_;
  for (const Term& term : terms_) {
    const LowRankChange& change = *term.change;
    const std::size_t rank = change.rank, expert = change.first_expert + matrix / of_expert_;
    if (term.right.empty()) own = unpack_right(change, expert);
    left.resize((last - first) * rank);
    for (std::size_t i = first; i < last; ++i) {
      const std::size_t row = change.first_row + (part + i - before) * change.row_step;
      for (std::size_t k = 0; k < rank; ++k) {
        left[(i - first) * rank + k] =
            change.transposed ? of_a(change, expert, k, row) : of_b(change, expert, k, row);
      }
    }
    const double* right = term.right.empty() ? own.data() : term.right.data();
    add_low_rank({left.data(), right, rank, cols_, change.factor, merged.data()}, last - first);
  }
}

void MergedPanels::scale_rows(std::size_t first, std::size_t last,
                              std::vector<double>& merged) const {
  for (std::size_t i = first; i < last; ++i) {
    double* row = merged.data() + (i - first) * cols_;
    if (!column_factors_.empty()) {
      for (std::size_t j = 0; j < cols_; ++j) row[j] *= column_factors_[j];
      continue;
    }
    const double factor = magnitude_[i] / std::sqrt(sum_of_squares(row, cols_));
    for (std::size_t j = 0; j < cols_; ++j) row[j] *= factor;
  }
}

void MergedPanels::find_column_factors(ParallelFor parallel_for) {
  std::vector<double> sums(kPieces * cols_);
  parallel_for(kPieces, 1, [&](std::size_t piece, std::size_t end) {
    std::vector<float> base;
    std::vector<double> merged;
    for (; piece < end; ++piece) {
      double* sum = sums.data() + piece * cols_;
      for (std::size_t p = piece; p < panels(); p += kPieces) {
        const std::size_t first = first_row(p), last = last_row(p);
        read_base(first, last, base);
        start(first, last, base, merged);
        add_terms(first, last, merged);
        for (std::size_t i = 0; i < merged.size(); ++i) sum[i % cols_] += merged[i] * merged[i];
      }
    }
  });
  column_factors_.resize(cols_);
  for (std::size_t j = 0; j < cols_; ++j) {
    double sum = 0;
    for (std::size_t piece = 0; piece < kPieces; ++piece) sum += sums[piece * cols_ + j];
    column_factors_[j] = magnitude_[j] / std::sqrt(sum);
  }
}

void MergedPanels::merge(std::size_t first, std::size_t last, const std::vector<float>& base,
                         std::vector<double>& merged) const {
  start(first, last, base, merged);
  add_terms(first, last, merged);
  if (!magnitude_.empty()) scale_rows(first, last, merged);
  if (weight_.tokens != nullptr) {
    const auto& [rows, tokens] = *weight_.tokens;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      if (tokens[t] < first || tokens[t] >= last) continue;
      for (std::size_t j = 0; j < cols_; ++j) {
        merged[(tokens[t] - first) * cols_ + j] =
            load(rows.entry->dtype, rows.bytes().data(), t * cols_ + j);
      }
    }
  }
  for (const BiasChange& change : weight_.biases) {
    const LowRank& lora = *change.lora;
    for (std::size_t j = 0; j < merged.size(); ++j) {
      merged[j] += change.factor * load(lora.bias->dtype, lora.bias_bytes, first * cols_ + j);
    }
  }
  const auto bad = std::find_if(merged.begin(), merged.end(),
                                [](double value) { return !std::isfinite(value); });
  // What is only copied or cast keeps the NaN of its base; a packed one ends beyond its type.
  if (bad != merged.end() && (weight_.is_changed() || weight_.base->is_packed())) {
    const auto at = static_cast<std::size_t>(bad - merged.begin());
    throw Error("weight " + text::in_quotes(weight_.name) + ": row " +
                std::to_string(first + at / cols_) + ", column " + std::to_string(at % cols_) +
                " would be " + std::to_string(*bad) + ": base or adapter is broken there");
  }
}

void MergedPanels::check_stored(std::size_t first, std::string_view type,
                                std::span<const double> merged,
                                std::span<const float> stored) const {
  for (std::size_t i = 0; i < merged.size(); ++i) {
    if (std::isfinite(stored[i]) || !std::isfinite(merged[i])) continue;
    std::array<char, 32> value{};
    std::snprintf(value.data(), value.size(), "%.9g", merged[i]);
    throw Error("weight " + text::in_quotes(weight_.name) + ": row " +
                std::to_string(first + i / cols_) + ", column " + std::to_string(i % cols_) +
                " is " + value.data() + ", " + std::string(type) +
                (type == "fp16" ? " ends at 65504" : " cannot hold it"));
  }
}

}  // namespace monograph
