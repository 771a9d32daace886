// Every ReadAhead of the process by the addresses it looks after, for operators: they know a
// pointer and not the model it belongs to.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "monograph/read_ahead/read_ahead.h"

namespace monograph {

// A number for close_read_ahead. Throws Error if one of the addresses is looked after already.
// A process that forks goes on; in the child nothing is read ahead until it opens its own.
std::int64_t open_read_ahead(std::unique_ptr<ReadAhead> read_ahead);
// Waits for the piece that is being read; nothing touches the memory afterwards. Operators that
// wait for a weight go on and fault. A number that is not open is no error: that of a parent.
void close_read_ahead(std::int64_t number);
// nullptr if it is not open.
std::shared_ptr<ReadAhead> find_read_ahead(std::int64_t number);

namespace read_ahead {
extern std::atomic<int> open_count;
void note_use(const void* address);
}  // namespace read_ahead

// Whether any is open: all that an operator asks where none is.
inline bool reads_ahead() { return read_ahead::open_count.load(std::memory_order_relaxed) != 0; }

// An operator is about to read what lies at an address, which may be any. See ReadAhead::use.
inline void note_use(const void* address) {
  if (reads_ahead()) read_ahead::note_use(address);
}

}  // namespace monograph
