// Fibers by ucontext: every architecture of the C library has it, and both sanitizers can be told
// of it. A switch takes two system calls (for the signal mask), about half a microsecond, which the
// tests can afford; assembly of our own would need one version for each architecture.
#include "monograph/gpu/host/launch.h"

#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monograph/gpu/host/block.h"
#include "monograph/gpu/host/sanitizer.h"
#include "monograph/gpu/host/shared_memory.h"

namespace monograph::gpu::host {
namespace {

// Sanitizers make frames several times as large.
constexpr std::size_t kStackBytes = 256 << 10;

enum class State : std::uint8_t { kReady, kAtBarrier, kInWarp, kDone };

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
  bool zeros;
};

struct Fiber {
  ucontext_t context;
  std::byte* stack = nullptr;
  StackSeen seen;
  unsigned index = 0;
  State state = State::kReady;
  Line where = {};
  void* argument = nullptr;
  std::vector<std::vector<Copy>> groups;  // the last one is open
};

struct Block {
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  StackSeen scheduler_seen;
  SharedMemory shared;
  std::span<const Range> memory;
  const FunctionRef<void()>* body = nullptr;
  std::exception_ptr thrown;
  Fiber* current = nullptr;
  unsigned x = 0, y = 0;
};

thread_local Block* running = nullptr;

std::string text(const Line& where) {
  const char* file = std::strrchr(where.file, '/');
  return std::string(file == nullptr ? where.file : file + 1) + ":" + std::to_string(where.number);
}

[[noreturn]] void fail(FaultKind kind, const std::string& what) {
  throw KernelFault(kind, what + " (block " + std::to_string(running->x) + ", " +
                              std::to_string(running->y) + ")");
}

__attribute__((no_sanitize("thread"))) void yield(bool for_good) {
  Fiber* const self = running->current;
  release(&running->scheduler);
  leave_stack(self->seen, running->scheduler_seen, for_good);
  swapcontext(&self->context, &running->scheduler);
  enter_stack(self->seen, running->scheduler_seen);
}

__attribute__((no_sanitize("thread"))) void resume(Fiber& fiber) {
  running->current = &fiber;
  leave_stack(running->scheduler_seen, fiber.seen, false);
  swapcontext(&running->scheduler, &fiber.context);
  enter_stack(running->scheduler_seen, fiber.seen);
  acquire(&running->scheduler);  // it sees all that fibers did, and passes nothing on
  running->current = nullptr;
}

void run_body() {
  try {
    (*running->body)();
    release(running);
    const Unwatched quiet;
    for (const auto& group : running->current->groups)
      if (!group.empty())
        fail(FaultKind::kCopyNotWaitedFor, "thread " + std::to_string(running->current->index) +
                                               " ends with copies on their way");
  } catch (...) {
    const Unwatched quiet;
    if (!running->thrown) running->thrown = std::current_exception();
  }
  const Unwatched quiet;
  running->current->state = State::kDone;
}

__attribute__((no_sanitize("thread"))) void fiber_main() {
  enter_stack(running->current->seen, running->scheduler_seen);
  acquire(running);
  run_body();
  yield(/*for_good=*/true);
}

// A permutation of n places: `stride` has no factor in common with n.
unsigned in_order(Order order, unsigned k, unsigned n, unsigned stride) {
  if (order == Order::kAscending) return k;
  if (order == Order::kDescending) return n - 1 - k;
  return static_cast<unsigned>((std::uint64_t{k} * stride + n / 3) % n);
}
unsigned coprime_stride(unsigned n) {
  unsigned stride = n * 5 / 8 | 1;
  const auto common = [](unsigned a, unsigned b) {
    while (b != 0) a = std::exchange(b, a % b);
    return a;
  };
  while (common(stride, n) != 1) stride += 2;
  return stride;
}

std::string waiting_threads(const Block& block) {
  std::string list;
  for (const State state : {State::kAtBarrier, State::kInWarp, State::kDone}) {
    unsigned count = 0;
    const Fiber* first = nullptr;
    for (const Fiber& f : block.fibers) {
      if (f.state != state) continue;
      if (count++ == 0) first = &f;
    }
    if (count == 0) continue;
    list += (list.empty() ? "" : ", ") + std::to_string(count);
    if (state == State::kDone)
      list += " have ended";
    else
      list += std::string(state == State::kAtBarrier ? " at the barrier " : " in the operation ") +
              text(first->where);
  }
  return list;
}

void pass_barrier(Block& block) {
  const Fiber& first = block.fibers.front();
  for (const Fiber& f : block.fibers)
    if (f.where.number != first.where.number || std::strcmp(f.where.file, first.where.file) != 0)
      fail(FaultKind::kDivergentBarrier, "thread 0 waits at " + text(first.where) + ", thread " +
                                             std::to_string(f.index) + " at " + text(f.where));
  block.shared.pass_barrier();
  for (Fiber& f : block.fibers) f.state = State::kReady;
}

void run_fibers(Block& block, Order order, unsigned stride) {
  const unsigned n = static_cast<unsigned>(block.fibers.size());
  for (;;) {
    bool moved = false;
    for (unsigned k = 0; k < n; ++k) {
      Fiber& fiber = block.fibers[in_order(order, k, n, stride)];
      if (fiber.state != State::kReady) continue;
      resume(fiber);
      moved = true;
      if (block.thrown) std::rethrow_exception(block.thrown);
    }
    std::size_t done = 0, waiting = 0;
    for (const Fiber& f : block.fibers) {
      done += f.state == State::kDone;
      waiting += f.state == State::kAtBarrier;
    }
    if (done == n) return;
    if (waiting == n)
      pass_barrier(block);
    else if (!moved)
      fail(waiting != 0 ? FaultKind::kDivergentBarrier : FaultKind::kDivergentWarp,
           "threads wait for others that never come: " + waiting_threads(block));
  }
}

void run_block(Block& block, Order order, unsigned stride) {
  block.shared.begin_block();
  for (Fiber& f : block.fibers) {
    f.state = State::kReady;
    f.seen.frames = nullptr;
    f.groups.assign(1, {});
    getcontext(&f.context);
    f.context.uc_stack = {};
    f.context.uc_stack.ss_sp = f.stack;
    f.context.uc_stack.ss_size = kStackBytes;
    f.context.uc_link = nullptr;
    makecontext(&f.context, fiber_main, 0);
  }
  release(&block);
  run_fibers(block, order, stride);
  acquire(&block);
}

// Stacks, and what sanitizers know of them, are kept from launch to launch.
struct KeptStack {
  std::unique_ptr<std::byte[]> bytes;
  StackSeen seen;
};
std::vector<KeptStack>& kept_stacks() {
  static thread_local std::vector<KeptStack> kept;
  return kept;
}

}  // namespace

const char* name_of(FaultKind kind) {
  constexpr const char* kNames[] = {"missing barrier",
                                    "copy not waited for",
                                    "divergent barrier",
                                    "divergent warp operation",
                                    "misaligned access",
                                    "uninitialised shared memory",
                                    "shared memory out of bounds",
                                    "global memory out of bounds",
                                    "write to an input"};
  return kNames[static_cast<std::size_t>(kind)];
}

void launch(const Grid& grid, std::span<const Range> memory, Order order,
            FunctionRef<void()> body) {
  if (grid.threads == 0 || grid.threads % kWarp != 0 || grid.threads > 1024)
    throw std::invalid_argument("a block has " + std::to_string(grid.threads) +
                                " threads, wanted 32 to 1024 in whole warps");
  const auto block = std::make_unique<Block>();
  block->memory = memory;
  block->body = &body;
  block->fibers.resize(grid.threads);
  std::vector<KeptStack>& kept = kept_stacks();
  while (kept.size() < grid.threads) {
    kept.push_back({std::unique_ptr<std::byte[]>(new std::byte[kStackBytes]), {}});
    begin_fiber_stack(kept.back().seen, kept.back().bytes.get(), kStackBytes);
  }
  for (unsigned i = 0; i < grid.threads; ++i) {
    block->fibers[i].index = i;
    block->fibers[i].stack = kept[i].bytes.get();
    block->fibers[i].seen = kept[i].seen;
  }
  running = block.get();
  begin_host_stack(block->scheduler_seen);
  const unsigned blocks = grid.x * grid.y;
  const unsigned thread_stride = coprime_stride(grid.threads);
  const unsigned block_stride = blocks == 0 ? 1 : coprime_stride(blocks);
  try {
    for (unsigned k = 0; k < blocks; ++k) {
      const unsigned i = in_order(order, k, blocks, block_stride);
      block->x = i % grid.x;
      block->y = i / grid.x;
      run_block(*block, order, thread_stride);
    }
  } catch (...) {
    // Fibers were left where they stood.
    for (unsigned i = 0; i < grid.threads; ++i) {
      end_fiber_stack(kept[i].seen);
      begin_fiber_stack(kept[i].seen, kept[i].bytes.get(), kStackBytes);
    }
    running = nullptr;
    throw;
  }
  running = nullptr;
}

Place place() {
  const Unwatched quiet;
  return {running->current->index, running->x, running->y};
}

namespace {

void check_access(const void* p, std::size_t bytes, std::size_t alignment, bool write) {
  if (running == nullptr) return;
  const Unwatched quiet;
  const unsigned thread = running->current->index;
  if (reinterpret_cast<std::uintptr_t>(p) % alignment != 0)
    fail(FaultKind::kMisaligned,
         std::to_string(bytes) + " bytes at an address that is no multiple of " +
             std::to_string(alignment) + ", by thread " + std::to_string(thread));
  if (running->shared.owns(p)) {
    write ? running->shared.check_write(p, bytes, thread)
          : running->shared.check_read(p, bytes, thread);
    return;
  }
  const std::byte* at = static_cast<const std::byte*>(p);
  for (const Range& range : running->memory) {
    const std::byte* begin = static_cast<const std::byte*>(range.begin);
    if (at < begin || at + bytes > begin + range.bytes) continue;
    if (write && !range.writable) fail(FaultKind::kReadOnly, "by thread " + std::to_string(thread));
    return;
  }
  fail(FaultKind::kGlobalOutOfBounds, std::to_string(bytes) + " bytes in none of the " +
                                          std::to_string(running->memory.size()) +
                                          " ranges, by thread " + std::to_string(thread));
}

}  // namespace

void check_read(const void* p, std::size_t bytes, std::size_t alignment) {
  check_access(p, bytes, alignment, /*write=*/false);
}
void check_write(void* p, std::size_t bytes, std::size_t alignment) {
  check_access(p, bytes, alignment, /*write=*/true);
}

std::byte* shared_object(std::size_t bytes) {
  const Unwatched quiet;
  return running->shared.object(bytes);
}

namespace {

void wait(State state, Line where) {
  {
    const Unwatched quiet;
    running->current->state = state;
    running->current->where = where;
  }
  yield(/*for_good=*/false);
}

}  // namespace

void barrier(Line where) {
  release(running);
  wait(State::kAtBarrier, where);
  acquire(running);
}

namespace {

// Whether the thread is the last of its warp to come; the operation is then done.
bool arrive(void* mine, FunctionRef<void(void* const*)> all, Line where) {
  const Unwatched quiet;
  Fiber* const self = running->current;
  Fiber* const first = &running->fibers[self->index / kWarp * kWarp];
  self->argument = mine;
  self->state = State::kInWarp;
  self->where = where;
  void* lanes[kWarp];
  for (unsigned i = 0; i < kWarp; ++i) {
    if (first[i].state != State::kInWarp) return false;
    lanes[i] = first[i].argument;
  }
  for (unsigned i = 0; i < kWarp; ++i)
    if (first[i].where.number != where.number)
      fail(FaultKind::kDivergentWarp, "lane " + std::to_string(self->index % kWarp) + " is at " +
                                          text(where) + ", lane " + std::to_string(i) + " at " +
                                          text(first[i].where));
  all(lanes);
  for (unsigned i = 0; i < kWarp; ++i) first[i].state = State::kReady;
  return true;
}

}  // namespace

// Orders no memory: on a GPU a shuffle does not either.
void warp_together(void* mine, FunctionRef<void(void* const*)> all, Line where) {
  if (!arrive(mine, all, where)) yield(/*for_good=*/false);
}

void copy_later(void* to, const void* from, std::size_t bytes, bool zeros) {
  if (!zeros) check_read(from, bytes, bytes);
  check_access(to, bytes, bytes, /*write=*/true);
  const Unwatched quiet;
  running->shared.begin_copy(to, bytes, running->current->index);
  running->current->groups.back().push_back({to, from, bytes, zeros});
}

void close_group() {
  const Unwatched quiet;
  running->current->groups.emplace_back();
}

void wait_for_groups(std::size_t but_last) {
  std::vector<Copy> arrived;
  {
    const Unwatched quiet;
    auto& groups = running->current->groups;
    while (groups.size() > but_last + 1) {
      arrived.insert(arrived.end(), groups.front().begin(), groups.front().end());
      groups.erase(groups.begin());
    }
    for (const Copy& copy : arrived)
      running->shared.end_copy(copy.to, copy.bytes, running->current->index);
  }
  for (const Copy& copy : arrived) {
    if (copy.zeros)
      std::memset(copy.to, 0, copy.bytes);
    else
      std::memcpy(copy.to, copy.from, copy.bytes);
  }
}

}  // namespace monograph::gpu::host
