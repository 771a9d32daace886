#include "monograph/train/row_order.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numeric>
#include <span>

#include "monograph/hash/sha256.h"
#include "monograph/packing/packing.h"

namespace monograph::train {
namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr std::size_t kChunk = std::size_t{1} << 18;  // documents that are packed at a time

// The finaliser of SplitMix64.
std::uint64_t mixed(std::uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
  return word ^ (word >> 31);
}

// A permutation that depends on the key alone.
std::vector<std::size_t> shuffled(std::size_t count, std::initializer_list<std::uint64_t> key) {
  std::uint64_t stream = 0;
  for (const std::uint64_t part : key) stream = mixed(stream + (part + 1) * kGolden);
  std::vector<std::int64_t> words(count);
  for (std::size_t i = 0; i < count; ++i)
    words[i] = static_cast<std::int64_t>(mixed(i * kGolden + stream));
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return words[a] < words[b]; });
  return order;
}

}  // namespace

std::int64_t documents_of_a_row(const std::vector<std::int64_t>& lengths, std::int64_t capacity) {
  const double sum =
      static_cast<double>(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}));
  const double mean = sum / static_cast<double>(lengths.size());
  const std::int64_t least = *std::min_element(lengths.begin(), lengths.end());
  // To even where two are equally near, as Python rounds.
  const double average = std::nearbyint(4 * static_cast<double>(capacity) / mean);
  const std::int64_t wanted = std::max<std::int64_t>(16, static_cast<std::int64_t>(average));
  return std::max<std::int64_t>(1, std::min(capacity / std::max<std::int64_t>(1, least), wanted));
}

RowOrder::RowOrder(std::vector<std::int64_t> lengths, const RowOrderSettings& settings)
    : lengths_(std::move(lengths)), settings_(settings) {}

json::Value RowOrder::identity() const {
  using json::Value;
  const auto number = [](std::size_t n) { return Value::number(static_cast<std::int64_t>(n)); };
  Sha256 hash;
  hash.add({reinterpret_cast<const std::uint8_t*>(lengths_.data()),
            lengths_.size() * sizeof(std::int64_t)});
  Value identity = Value::object();
  identity.set("epoch", number(0));
  identity.set("step", number(0));
  identity.set("lengths_sha256", Value::string(hash.hex()));
  identity.set("capacity", Value::number(settings_.capacity));
  identity.set("rows_per_step", number(settings_.rows_per_batch * settings_.batches_per_step));
  identity.set("seed", number(settings_.seed));
  identity.set("shuffle", Value::boolean(settings_.shuffle));
  identity.set("chunk", number(kChunk));
  identity.set("strategy", Value::string(settings_.shuffle ? "best_fit_decreasing" : "first_fit"));
  identity.set("overlong", Value::string("refuse"));
  identity.set("max_documents", Value::number(settings_.max_documents));
  return identity;
}

void RowOrder::pack_epoch(std::uint64_t epoch) {
  if (packed_ && epoch_ == epoch) return;
  const bool shuffle = settings_.shuffle;
  std::vector<std::size_t> order = shuffled(shuffle ? lengths_.size() : 0, {settings_.seed, epoch});
  if (!shuffle) {
    order.resize(lengths_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
  }
  rows_.clear();
  const PackOptions options = {settings_.capacity, settings_.max_documents,
                               shuffle ? PackStrategy::kBestFitDecreasing : PackStrategy::kFirstFit,
                               Overlong::kRefuse};
  for (std::size_t begin = 0, chunk = 0; begin < order.size(); begin += kChunk, ++chunk) {
    const std::size_t count = std::min(kChunk, order.size() - begin);
    std::vector<std::int64_t> own(count);
    for (std::size_t i = 0; i < count; ++i) own[i] = lengths_[order[begin + i]];
    const Packing packing = pack(own, options);
    const std::size_t rows = packing.row_offsets.size() - 1;
    std::vector<std::size_t> places = shuffled(shuffle ? rows : 0, {settings_.seed, epoch, chunk});
    for (std::size_t i = 0; i < rows; ++i) {
      const std::size_t row = shuffle ? places[i] : i;
      std::vector<std::size_t>& documents = rows_.emplace_back();
      for (std::int64_t p = packing.row_offsets[row]; p < packing.row_offsets[row + 1]; ++p)
        documents.push_back(order[begin + static_cast<std::size_t>(
                                              packing.documents[static_cast<std::size_t>(p)])]);
    }
  }
  packed_ = true;
  epoch_ = epoch;
}

std::size_t RowOrder::steps(std::uint64_t epoch) {
  pack_epoch(epoch);
  const std::size_t each = settings_.rows_per_batch * settings_.batches_per_step;
  return (rows_.size() + each - 1) / each;
}

std::vector<std::vector<std::size_t>> RowOrder::step(std::uint64_t epoch, std::size_t step) {
  pack_epoch(epoch);
  std::vector<std::vector<std::size_t>> batches;
  const std::size_t each = settings_.rows_per_batch;
  const std::size_t first = step * settings_.batches_per_step;
  // A step may be larger than the epoch by far.
  for (std::size_t i = first; i < first + settings_.batches_per_step && i * each < rows_.size();
       ++i) {
    std::vector<std::size_t> documents;
    for (std::size_t row = i * each; row < std::min((i + 1) * each, rows_.size()); ++row)
      documents.insert(documents.end(), rows_[row].begin(), rows_[row].end());
    if (!documents.empty()) batches.push_back(std::move(documents));
  }
  return batches;
}

}  // namespace monograph::train
