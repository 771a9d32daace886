#include "monograph/weights/page_advice.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "monograph/weights/composed_weight.h"

namespace monograph {
namespace {

// Tells the kernel about a part of a mapping; a hint, so errors do not matter.
void advise(MappedBytes bytes, int advice) {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  if (bytes.empty()) return;
  // A mapping begins with a page, so the page of the first byte belongs to it.
  const std::size_t before = reinterpret_cast<std::uintptr_t>(bytes.data()) % page;
  ::madvise(const_cast<std::uint8_t*>(bytes.data() - before), bytes.size() + before, advice);
}

}  // namespace

std::vector<MappedBytes> source_pages(const Weight& weight, std::uint64_t begin,
                                      std::uint64_t end) {
  if (weight.elements == 0) return {};
  if (weight.composed) return weight.composed->bytes(begin, end);
  const MappedBytes values = weight.parts.front().tensor.bytes();
  const auto at = [&](std::uint64_t element) {
    return static_cast<std::size_t>(
        static_cast<double>(values.size()) *
        (static_cast<double>(element) / static_cast<double>(weight.elements)));
  };
  const std::size_t first = at(begin), last = std::min(at(end), values.size());
  return {values.subspan(first, last - first)};
}

void prefetch_pages(std::span<const MappedBytes> pages) {
  for (const MappedBytes bytes : pages) advise(bytes, MADV_WILLNEED);
}

void release_pages(std::span<const MappedBytes> pages) {
  for (const MappedBytes bytes : pages) advise(bytes, MADV_DONTNEED);
}

}  // namespace monograph
