#include "monograph/weights/page_advice.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <set>

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

void release_around(const Weight& weight, std::uint64_t begin, std::uint64_t end) {
  // The most that Linux keeps, and maps, as one piece of a file.
  constexpr std::size_t kFolio = 2 << 20;
  const std::vector<MappedBytes> pages = source_pages(weight, begin, end);
  std::set<const safetensors::Reader*> files;
  for (const Part& part : weight.parts) files.insert(part.tensor.file);
  for (const safetensors::Reader* file : files) {
    const MappedBytes all = file->all_bytes();
    std::size_t first = all.size(), last = 0;
    for (const MappedBytes part : pages) {
      if (part.data() < all.data() || part.data() >= all.data() + all.size()) continue;
      const auto at = static_cast<std::size_t>(part.data() - all.data());
      first = std::min(first, at);
      last = std::max(last, at + part.size());
    }
    if (first >= last) continue;
    first -= std::min(first, kFolio);
    advise(all.subspan(first, std::min(last + kFolio, all.size()) - first), MADV_DONTNEED);
  }
}

void prefetch_pages(std::span<const MappedBytes> pages) {
  for (const MappedBytes bytes : pages) advise(bytes, MADV_WILLNEED);
}

void release_pages(std::span<const MappedBytes> pages) {
  for (const MappedBytes bytes : pages) advise(bytes, MADV_DONTNEED);
}

}  // namespace monograph
