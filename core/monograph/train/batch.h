// A micro-batch: tokens, the tokens they are to predict, and the documents they lie in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace monograph::train {

struct Batch {
  std::size_t rows = 0, length = 0;  // rows * length tokens, row by row
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> targets;    // of each token the next one, or kIgnoredLabel
  std::vector<std::int64_t> positions;  // [length]: of the tokens of every row
  // As AttentionDocuments; `key_lengths` is empty where all keys between two offsets are a
  // document's.
  std::vector<std::int32_t> offsets, key_lengths;

  std::size_t tokens() const { return rows * length; }
  std::size_t count_targets() const;
};

// The tokens of a document and their labels. The first one's label counts for nothing.
struct Document {
  std::span<const std::int32_t> ids, labels;
};

// All documents in one row, filled up with `pad` to a multiple of `length`: padding is in no
// document. As monograph.packing.PackedCollator.
Batch packed_batch(std::span<const Document> documents, std::size_t length, std::int64_t pad);

// A document a row, `rows` of them, those that are missing without targets, filled up with `pad` to
// a multiple of `multiple`. As monograph.packing.PaddedCollator.
Batch padded_batch(std::span<const Document> documents, std::size_t rows, std::size_t multiple,
                   std::int64_t pad);

}  // namespace monograph::train
