#include "monograph/train/key_values.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace monograph::train {
namespace {

constexpr std::size_t kFewestRows = 256;

void copy_rows(const Activations& from, std::size_t rows, Activations& to, std::size_t first) {
  const std::size_t row = to.cols() * size_bytes(to.dtype());
  std::memcpy(static_cast<std::byte*>(to.data()) + first * row, from.data(), rows * row);
}

void grow(Activations& kept, std::size_t tokens, std::size_t rows) {
  Activations larger(kept.dtype(), rows, kept.cols());
  copy_rows(kept, tokens, larger, 0);
  kept = std::move(larger);
}

}  // namespace

KeyValues::KeyValues(DType dtype, std::size_t width)
    : keys_(dtype, kFewestRows, width), values_(dtype, kFewestRows, width) {}

void KeyValues::append(const Activations& keys, const Activations& values) {
  const std::size_t all = tokens_ + keys.rows();
  if (all > keys_.rows()) {
    const std::size_t rows = std::max(all, 2 * keys_.rows());
    grow(keys_, tokens_, rows);
    grow(values_, tokens_, rows);
  }
  copy_rows(keys, keys.rows(), keys_, tokens_);
  copy_rows(values, values.rows(), values_, tokens_);
  tokens_ = all;
}

}  // namespace monograph::train
