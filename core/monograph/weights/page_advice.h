// The mapped bytes behind elements of a weight, and what the system is told of them, so that memory
// does not grow with a checkpoint that is streamed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "monograph/weights/weight.h"

namespace monograph {

using MappedBytes = std::span<const std::uint8_t>;

// The values that elements [begin, end) are read from, at least.
std::vector<MappedBytes> source_pages(const Weight& weight, std::uint64_t begin, std::uint64_t end);

// They will be read soon.
void prefetch_pages(std::span<const MappedBytes> pages);
// They were read: they stay in the page cache, the mapping of this process gets small again.
void release_pages(std::span<const MappedBytes> pages);
// Elements [begin, end) were read: the same for what lies between and around their bytes in each
// file. The system maps neighbours of a page that is read; matrices of experts that are read and
// released one by one would leave some of them each.
void release_around(const Weight& weight, std::uint64_t begin, std::uint64_t end);

}  // namespace monograph
