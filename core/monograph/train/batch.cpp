#include "monograph/train/batch.h"

#include <algorithm>
#include <limits>
#include <string>

#include "monograph/base/error.h"
#include "monograph/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace monograph::train {
namespace {

std::size_t rounded_up(std::size_t tokens, std::size_t multiple) {
  return std::max<std::size_t>((tokens + multiple - 1) / multiple, 1) * multiple;
}

// AttentionDocuments counts tokens in 32 bits.
constexpr std::size_t kMostTokens = std::numeric_limits<std::int32_t>::max();

Batch empty_batch(std::size_t rows, std::size_t length, std::int64_t pad) {
  if (length > kMostTokens / std::max<std::size_t>(rows, 1))
    throw Error("a micro-batch has " + std::to_string(rows) + " rows of " + std::to_string(length) +
                " tokens, wanted " + std::to_string(kMostTokens) +
                " together at most; lower micro_batch_size or sequence_len");
  Batch batch;
  batch.rows = rows;
  batch.length = length;
  batch.ids.assign(rows * length, pad);
  batch.targets.assign(rows * length, kIgnoredLabel);
  batch.positions.resize(length);
  return batch;
}

// From token `first` on. A token predicts the one behind it in its document.
void place(Batch& batch, std::size_t first, const Document& document) {
  for (std::size_t i = 0; i < document.ids.size(); ++i) {
    batch.ids[first + i] = document.ids[i];
    if (i > 0) batch.targets[first + i - 1] = document.labels[i];
  }
}

}  // namespace

std::size_t Batch::count_targets() const {
  return static_cast<std::size_t>(std::count_if(
      targets.begin(), targets.end(), [](std::int64_t target) { return target != kIgnoredLabel; }));
}

Batch packed_batch(std::span<const Document> documents, std::size_t length, std::int64_t pad) {
  std::size_t tokens = 0;
  for (const Document& document : documents) tokens += document.ids.size();
  Batch batch = empty_batch(1, rounded_up(tokens, length), pad);
  batch.offsets.push_back(0);
  std::size_t first = 0;
  const auto number = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      batch.positions[i] = static_cast<std::int64_t>(i - begin);
  };
  for (const Document& document : documents) {
    if (document.ids.empty()) continue;
    place(batch, first, document);
    number(first, first + document.ids.size());
    first += document.ids.size();
    batch.offsets.push_back(static_cast<std::int32_t>(first));
  }
  number(first, batch.length);
  return batch;
}

Batch padded_batch(std::span<const Document> documents, std::size_t rows, std::size_t multiple,
                   std::int64_t pad) {
  std::size_t longest = 1;
  for (const Document& document : documents) longest = std::max(longest, document.ids.size());
  Batch batch = empty_batch(std::max(rows, documents.size()), rounded_up(longest, multiple), pad);
  for (std::size_t i = 0; i < batch.length; ++i) batch.positions[i] = static_cast<std::int64_t>(i);
  for (std::size_t row = 0; row < batch.rows; ++row) {
    // A row without a document is a token of padding.
    std::size_t tokens = 1;
    if (row < documents.size()) {
      tokens = documents[row].ids.size();
      place(batch, row * batch.length, documents[row]);
    }
    // The document, then a gap whose queries see no key.
    const std::size_t begin = row * batch.length;
    batch.offsets.push_back(static_cast<std::int32_t>(begin));
    batch.key_lengths.push_back(static_cast<std::int32_t>(tokens));
    batch.offsets.push_back(static_cast<std::int32_t>(begin + tokens));
    batch.key_lengths.push_back(0);
  }
  batch.offsets.push_back(static_cast<std::int32_t>(batch.tokens()));
  return batch;
}

}  // namespace monograph::train
