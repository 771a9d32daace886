#include "monograph/merge/panels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/convert/packed_parts.h"
#include "monograph/kernels/low_rank/low_rank.h"
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

// right[k, j]: A[k, j], or B[j, k] where the weight is transposed.
std::vector<double> unpack_right(const LowRankChange& change, std::size_t cols) {
  const LowRank& lora = *change.lora;
  const std::size_t rank = lora.rank, tiles = (cols + kLowRankTile - 1) / kLowRankTile;
  std::vector<double> right(tiles * rank * kLowRankTile);
  for (std::size_t k = 0; k < rank; ++k) {
    for (std::size_t j = 0; j < cols; ++j) {
      const std::size_t at = ((j / kLowRankTile) * rank + k) * kLowRankTile + j % kLowRankTile;
      right[at] = change.transposed ? load(lora.b->dtype, lora.b_bytes, j * rank + k)
                                    : load(lora.a->dtype, lora.a_bytes, k * cols + j);
    }
  }
  return right;
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

MergedPanels::MergedPanels(const MergedWeight& weight, ParallelFor parallel_for,
                           std::size_t multiple)
    : weight_(weight) {
  const std::vector<std::uint64_t>& shape = weight.shape;
  cols_ = shape.empty() ? 1 : shape.back();
  rows_ = cols_ == 0 ? 0 : weight.elements() / cols_;
  // Groups of four rows suit the kernel; what `multiple` needs comes first.
  const std::size_t step = multiple / std::gcd(std::max<std::size_t>(cols_, 1), multiple);
  const std::size_t fitting = kPanelElements / std::max<std::size_t>(cols_, 1);
  const std::size_t four = std::lcm(step, std::size_t{4});
  panel_rows_ = fitting >= four ? fitting / four * four : step;
  if (weight.base_as) quantize_base(parallel_for);
  for (const LowRankChange& change : weight.low_rank) {
    terms_.push_back({&change, unpack_right(change, cols_)});
  }
  if (terms_.empty() || weight.low_rank.front().lora->magnitude == nullptr) return;
  const LowRank& lora = *weight.low_rank.front().lora;
  magnitude_.resize(lora.magnitude->elements);
  for (std::size_t i = 0; i < magnitude_.size(); ++i) {
    magnitude_[i] = load(lora.magnitude->dtype, lora.magnitude_bytes, i);
  }
  if (weight.low_rank.front().transposed) find_column_factors(parallel_for);
}

void MergedPanels::quantize_base(ParallelFor parallel_for) {
  auto copy = std::make_unique<PackedCopy>(*weight_.base_as, 1, rows_, cols_);
  const DType type = source_dtype(*weight_.base);
  const std::size_t piece = copy->layout().range(kPanelElements);
  const std::size_t count = rows_ * cols_;
  const auto each_piece = [&](auto&& body) {
    parallel_for(ceil_div(count, piece), 1, [&](std::size_t at, std::size_t end) {
      std::vector<std::uint8_t> values(piece * size_bytes(type));
      for (at *= piece, end *= piece; at < std::min(end, count); at += piece) {
        const std::size_t last = std::min(count, at + piece);
        read_elements(*weight_.base, at, last, type, values.data());
        body(at, values.data(), last - at);
      }
    });
  };
  if (copy->wants_largest()) {
    std::vector<float> largest(ceil_div(count, piece) + 1);
    each_piece([&](std::size_t at, const void* values, std::size_t n) {
      largest[at / piece] = largest_magnitude(type, values, n);
    });
    copy->set_largest(0, *std::max_element(largest.begin(), largest.end()));
  }
  each_piece([&](std::size_t at, const void* values, std::size_t n) {
    copy->quantize(at, type, values, n);
  });
  copy->finish(parallel_for);
  packed_base_ = std::move(copy);
}

void MergedPanels::read_base(std::size_t first, std::size_t last, std::vector<float>& base) const {
  const std::size_t count = (last - first) * cols_;
  base.resize(count);
  const Weight& from = *weight_.base;
  const std::uint64_t begin = std::uint64_t{first} * cols_;
  const DType type = source_dtype(from);
  if (packed_base_) {
    for (std::size_t i = first; i < last; ++i) {
      packed_base_->read_row(i, type, base.data() + (i - first) * cols_);
    }
    return;
  }
  if (!from.is_packed() || type == DType::kFloat32) {
    read_elements(from, begin, begin + count, DType::kFloat32, base.data());
    return;
  }
  // As its library dequantises: to the type it was quantised from.
  std::vector<std::uint16_t> narrow(count);
  read_elements(from, begin, begin + count, type, narrow.data());
  for (std::size_t i = 0; i < count; ++i) {
    base[i] = type == DType::kBFloat16 ? to_float(Bf16{narrow[i]}) : to_float(Fp16{narrow[i]});
  }
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
  std::vector<double> left;
  for (const Term& term : terms_) {
    const LowRank& lora = *term.change->lora;
    const std::size_t rank = lora.rank;
    left.resize((last - first) * rank);
    for (std::size_t i = first; i < last; ++i) {
      for (std::size_t k = 0; k < rank; ++k) {
        left[(i - first) * rank + k] = term.change->transposed
                                           ? load(lora.a->dtype, lora.a_bytes, k * rows_ + i)
                                           : load(lora.b->dtype, lora.b_bytes, i * rank + k);
      }
    }
    add_low_rank({left.data(), term.right.data(), rank, cols_, term.change->factor, merged.data()},
                 last - first);
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
        const std::size_t first = p * panel_rows_, last = std::min(rows_, first + panel_rows_);
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
