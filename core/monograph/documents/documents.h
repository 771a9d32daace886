// Documents that lie one after another in one row of tokens, as ascending offsets say: document d
// has the tokens [offsets[d], offsets[d + 1]). Equal offsets are an empty document, so an array of
// fixed length is padded with the number of tokens. Tokens before, between and after the documents
// are gaps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace monograph {

struct TokenRange {
  std::int64_t begin, count;
};

// Throws an Error of `kernel` that names the offset which is negative, descends or lies beyond
// `tokens`. `offsets` holds count + 1 of them.
void check_offsets(const char* kernel, const char* name, const std::int32_t* offsets,
                   std::size_t count, std::size_t tokens);

// body(begin, end) for the gaps in [0, tokens), some of them empty. range_of(document) is a
// TokenRange; the ranges ascend.
template <class Documents, class RangeOf, class Body>
void for_gaps(const Documents& documents, std::size_t tokens, const RangeOf& range_of,
              const Body& body) {
  std::size_t covered = 0;
  for (const auto& document : documents) {
    const TokenRange range = range_of(document);
    body(covered, std::max(covered, static_cast<std::size_t>(range.begin)));
    covered = std::max(covered, static_cast<std::size_t>(range.begin + range.count));
  }
  body(covered, tokens);
}

}  // namespace monograph
