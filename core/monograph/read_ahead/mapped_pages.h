// Pages of files that are mapped into this process: read them in and wait for them, let them go,
// count them. No call changes what is in memory: a page of which there is a private copy stays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "monograph/base/function_ref.h"

namespace monograph {

// `bytes` from `address` on, which are those of an open file from `offset` on.
struct MappedBytes {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  int file = -1;
  std::size_t offset = 0;
};

// Returns when the bytes are in memory and in the page tables. Throws Error with the name of the
// file if they cannot be read, which is also so where the file has become shorter.
void read_pages(const MappedBytes& range);

// Pages that lie within the range leave memory, unless somebody else holds them.
void drop_pages(const MappedBytes& range);
// The same; `looked` is called between looking at the pages and letting them go, for tests.
void drop_pages(const MappedBytes& range, FunctionRef<void()> looked);

// Bytes of the range whose pages are in the page tables of this process. Others may hold more of
// the file in the page cache.
std::size_t held_pages(const MappedBytes& range);

// For tables of which rows are used: a fault reads its page and nothing around it.
void read_no_neighbours(const MappedBytes& range);

std::string name_of_file(int file);

}  // namespace monograph
