// monograph::read_ahead_*: a base larger than memory, as Python opens and watches it.
#include "monograph/read_ahead/read_ahead.h"

#include <limits>

#include "monograph/base/error.h"
#include "monograph/read_ahead/registry.h"
#include "stable.h"

namespace monograph::ops {
namespace {

using Numbers = std::vector<std::int64_t>;
constexpr std::size_t kPerTensor = 6;

// tensors: six numbers each: address, bytes, unit, place in `files`, offset in the file, Reading.
std::int64_t open(const Numbers& tensors, const Numbers& files, std::int64_t allowed) {
  const char* const op = "read_ahead_open";
  STD_TORCH_CHECK(!tensors.empty() && tensors.size() % kPerTensor == 0, op, ": tensors has ",
                  tensors.size(), " numbers, wanted ", kPerTensor, " for each, of one at least");
  STD_TORCH_CHECK(allowed > 0, op, ": allowed is ", allowed, ", wanted a number of bytes");
  std::vector<MappedTensor> mapped;
  mapped.reserve(tensors.size() / kPerTensor);
  for (std::size_t i = 0; i < tensors.size(); i += kPerTensor) {
    const auto at = [&](std::size_t j) { return static_cast<std::size_t>(tensors[i + j]); };
    STD_TORCH_CHECK(
        tensors[i] > 0 && tensors[i + 1] > 0 && at(2) < tensors.size() / kPerTensor &&
            at(3) < files.size() && tensors[i + 4] >= 0 && at(5) <= 2,
        op, ": tensor ", i / kPerTensor,
        " has numbers out of range, wanted address, bytes, unit, place in files, offset, "
        "reading");
    STD_TORCH_CHECK(files[at(3)] >= 0 && files[at(3)] <= std::numeric_limits<int>::max(), op,
                    ": files[", at(3), "] is ", files[at(3)], ", wanted an open file");
    mapped.push_back({{at(0), at(1), static_cast<int>(files[at(3)]), at(4)},
                      at(2),
                      static_cast<Reading>(at(5))});
  }
  try {
    return open_read_ahead(
        std::make_unique<ReadAhead>(std::move(mapped), static_cast<std::size_t>(allowed)));
  } catch (const Error& error) {
    STD_TORCH_CHECK(false, op, ": ", error.what());
  }
  return 0;
}

void close(std::int64_t number) { close_read_ahead(number); }

std::shared_ptr<ReadAhead> found(std::int64_t number) {
  std::shared_ptr<ReadAhead> ahead = find_read_ahead(number);
  STD_TORCH_CHECK(ahead != nullptr, "read_ahead: ", number, " is not open in this process");
  return ahead;
}

// [allowed, held, most held, read, dropped, ns waited]
Numbers numbers(std::int64_t number) {
  const ReadAheadNumbers n = found(number)->numbers();
  Numbers result;
  for (const std::size_t bytes : {n.allowed, n.held, n.most_held, n.read, n.dropped})
    result.push_back(static_cast<std::int64_t>(bytes));
  result.push_back(n.waited);
  return result;
}

// Five numbers each: kind, unit, begin, end, bytes.
Numbers events(std::int64_t number) {
  Numbers result;
  for (const ReadAheadEvent& event : found(number)->events()) {
    const auto unit = static_cast<std::int64_t>(event.unit);
    const auto bytes = static_cast<std::int64_t>(event.bytes);
    for (const std::int64_t value :
         {static_cast<std::int64_t>(event.kind), unit, event.begin, event.end, bytes})
      result.push_back(value);
  }
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CompositeExplicitAutograd, m) {
  m.impl("read_ahead_open", TORCH_BOX(&open));
  m.impl("read_ahead_close", TORCH_BOX(&close));
  m.impl("read_ahead_numbers", TORCH_BOX(&numbers));
  m.impl("read_ahead_events", TORCH_BOX(&events));
}

}  // namespace monograph::ops
