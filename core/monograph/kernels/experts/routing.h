// Which slot goes where: a stable counting sort of slots by expert.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/kernels/experts/experts.h"

namespace monograph {

struct Routing {
  std::vector<std::uint32_t> active;   // experts with rows, in order
  std::vector<std::uint32_t> offsets;  // of each active one's places; behind them all that are kept
  std::vector<std::uint32_t> slots;    // of each place
  std::vector<std::uint32_t> tokens;   // the row of x of each place
  std::vector<std::uint32_t> places;   // of each slot; kSkippedRow for those skipped

  std::size_t kept() const { return slots.size(); }
  std::size_t first(std::size_t i) const { return offsets[i]; }
  std::size_t rows(std::size_t i) const { return offsets[i + 1] - offsets[i]; }
};

Routing sort_slots(const ExpertsProblem& problem);

// body(first, last) over rows of `cols` elements, some 10 microseconds at least.
template <class Body>
void each_rows(std::size_t rows, std::size_t cols, ParallelFor parallel_for, const Body& body) {
  constexpr std::size_t kPiece = 16384;
  const std::size_t grain = cols >= kPiece ? 1 : kPiece / (cols + 1) + 1;
  parallel_for(rows, grain, body);
}

}  // namespace monograph
