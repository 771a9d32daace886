#include "monograph/files/tests/failing_allocator.h"

#include <cstdlib>
#include <new>

namespace monograph::files {

thread_local long allocations_left = -1;

}  // namespace monograph::files

void* operator new(std::size_t size) {
  long& left = monograph::files::allocations_left;
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*size*/) noexcept { std::free(memory); }
