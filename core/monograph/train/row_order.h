// Which documents share a row, and which rows a step has, as a function of (seed, epoch, step): the
// order of monograph.packing.PackedSampler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/text/json_document.h"

namespace monograph::train {

struct RowOrderSettings {
  std::int64_t capacity = 0;       // tokens of a row
  std::int64_t max_documents = 1;  // of a row
  std::size_t rows_per_batch = 1, batches_per_step = 1;
  std::uint64_t seed = 0;
  bool shuffle = true;  // false: documents in their order, first fit
};

// The most documents that a packed row may have: four times the average, 16 at least.
std::int64_t documents_of_a_row(const std::vector<std::int64_t>& lengths, std::int64_t capacity);

class RowOrder {
 public:
  // Throws Error for a document that is longer than a row.
  RowOrder(std::vector<std::int64_t> lengths, const RowOrderSettings& settings);

  // All that the order depends on, as PackedSampler.state_dict has it at the beginning.
  json::Value identity() const;
  std::size_t steps(std::uint64_t epoch);
  // The documents of each micro-batch of a step; empty ones are left out.
  std::vector<std::vector<std::size_t>> step(std::uint64_t epoch, std::size_t step);

 private:
  void pack_epoch(std::uint64_t epoch);

  std::vector<std::int64_t> lengths_;
  RowOrderSettings settings_;
  bool packed_ = false;
  std::uint64_t epoch_ = 0;
  std::vector<std::vector<std::size_t>> rows_;  // of the epoch
};

}  // namespace monograph::train
