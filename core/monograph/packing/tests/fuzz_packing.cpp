// Any lengths and options: every token of every document lies in exactly one row, no row is too
// full.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/packing/packing.h"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

void check_rows(const monograph::Packing& packing, const std::vector<std::int64_t>& lengths,
                const monograph::PackOptions& options) {
  std::vector<std::int64_t> seen(lengths.size());
  for (std::size_t row = 0; row + 1 < packing.row_offsets.size(); ++row) {
    const auto begin = static_cast<std::size_t>(packing.row_offsets[row]);
    const auto end = static_cast<std::size_t>(packing.row_offsets[row + 1]);
    check(begin < end && static_cast<std::int64_t>(end - begin) <= options.max_documents);
    std::int64_t tokens = 0;
    for (std::size_t p = begin; p < end; ++p) {
      const auto document = static_cast<std::size_t>(packing.documents[p]);
      const std::int64_t start = packing.starts.empty() ? 0 : packing.starts[p];
      const std::int64_t length = std::min(options.capacity, lengths[document] - start);
      check(length > 0);
      tokens += length;
      seen[document] += length;
    }
    check(tokens <= options.capacity);
  }
  const bool split = options.overlong == monograph::Overlong::kSplit;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    check(seen[i] == (split ? lengths[i] : std::min(lengths[i], options.capacity)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 4) return 0;
  monograph::PackOptions options;
  options.capacity = 1 + data[0] * 17;
  options.max_documents = data[1] % 2 == 0 ? monograph::kAnyNumber : 1 + data[1] / 16;
  options.strategy = static_cast<monograph::PackStrategy>(data[2] % 2);
  options.overlong = static_cast<monograph::Overlong>(data[3] % 3);
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 4; i + 2 <= size; i += 2) {
    std::int16_t length;
    std::memcpy(&length, data + i, sizeof length);
    lengths.push_back(length);
  }
  try {
    check_rows(monograph::pack(lengths, options), lengths, options);
  } catch (const monograph::Error&) {
    check(std::any_of(lengths.begin(), lengths.end(), [&](std::int64_t length) {
      return length < 0 ||
             (length > options.capacity && options.overlong == monograph::Overlong::kRefuse);
    }));
  }
  return 0;
}
