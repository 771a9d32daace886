// Faults that a GPU would answer with wrong numbers or none at all: the harness names each.
#include <gtest/gtest.h>

#include <vector>

#include "monograph/gpu/host/launch.h"
#include "monograph/gpu/prims.h"

namespace monograph::gpu {
namespace {

using host::FaultKind;
using host::Grid;
using host::KernelFault;
using host::Order;
using host::Range;

// The fault's name for each order of the threads; empty for none.
template <class Body>
void expect_fault(FaultKind want, std::vector<Range> memory, Body body) {
  for (const Order order : host::kOrders) {
    try {
      host::launch(Grid{2, 1, 64}, memory, order, body);
      ADD_FAILURE() << "no fault, wanted: " << host::name_of(want);
    } catch (const KernelFault& fault) {
      EXPECT_EQ(fault.kind(), want) << fault.what();
      EXPECT_NE(std::string(fault.what()).find(host::name_of(want)), std::string::npos);
    }
  }
}

struct Turned {
  float values[64];
};

// out[i] = in[63 - i] through shared memory.
void turn_around(const float* in, float* out, bool barrier) {
  Turned& shared = shared_memory<Turned>();
  const unsigned i = thread_index();
  write(&shared.values[i], read(in + i));
  if (barrier) sync_threads();
  write(out + 64 * block_index_x() + i, read(&shared.values[63 - i]));
}

TEST(GpuFaults, NoneInAKernelThatIsRight) {
  std::vector<float> in(64), out(128);
  for (std::size_t i = 0; i < 64; ++i) in[i] = static_cast<float>(i);
  const std::vector<Range> memory = {host::input(in), host::output(out)};
  for (const Order order : host::kOrders) {
    out.assign(128, -1.0f);
    host::launch(Grid{2, 1, 64}, memory, order, [&] { turn_around(in.data(), out.data(), true); });
    for (std::size_t i = 0; i < 128; ++i) ASSERT_EQ(out[i], static_cast<float>(63 - i % 64));
  }
}

TEST(GpuFaults, MissingBarrierBeforeARead) {
  std::vector<float> in(64), out(128);
  // Where a thread runs first, it reads what nobody has written yet: the same fault, seen earlier.
  for (const Order order : host::kOrders) try {
      host::launch(Grid{1, 1, 64}, std::vector<Range>{host::input(in), host::output(out)}, order,
                   [&] { turn_around(in.data(), out.data(), false); });
      ADD_FAILURE() << "no fault";
    } catch (const KernelFault& fault) {
      EXPECT_TRUE(fault.kind() == FaultKind::kMissingBarrier ||
                  fault.kind() == FaultKind::kUninitialisedShared)
          << fault.what();
    }
  // Once all of it has been written, only the barrier is missing.
  expect_fault(FaultKind::kMissingBarrier, {}, [] {
    Turned& shared = shared_memory<Turned>();
    const unsigned i = thread_index();
    write(&shared.values[i], 0.0f);
    sync_threads();
    write(&shared.values[i], 1.0f);
    read(&shared.values[63 - i]);
  });
}

TEST(GpuFaults, MissingBarrierBeforeTheNextWrite) {
  expect_fault(FaultKind::kMissingBarrier, {}, [] {
    Turned& shared = shared_memory<Turned>();
    const unsigned i = thread_index();
    write(&shared.values[i], 1.0f);
    sync_threads();
    read(&shared.values[63 - i]);
    write(&shared.values[i], 2.0f);
  });
}

TEST(GpuFaults, TwoThreadsWriteTheSamePlace) {
  expect_fault(FaultKind::kMissingBarrier, {}, [] {
    Turned& shared = shared_memory<Turned>();
    write(&shared.values[thread_index() / 2], 1.0f);
  });
}

struct alignas(16) Copied {
  float values[64 * 4];
};

void copy_through(const float* in, float* out, bool wait) {
  Copied& shared = shared_memory<Copied>();
  const unsigned i = thread_index();
  copy_async(&shared.values[4 * i], in + 4 * i, /*zeros=*/false);
  close_group();
  if (wait) wait_for_groups<0>();
  sync_threads();
  write(out + i, read(&shared.values[4 * (63 - i)]));
}

TEST(GpuFaults, CopyNotWaitedFor) {
  struct alignas(16) Four {
    float values[4];
  };
  std::vector<Four> in(64);
  std::vector<float> out(64);
  in[63].values[0] = 7.0f;
  const std::vector<Range> memory = {host::input(in), host::output(out)};
  const float* const from = in[0].values;
  for (const Order order : host::kOrders) {
    host::launch(Grid{1, 1, 64}, memory, order, [&] { copy_through(from, out.data(), true); });
    EXPECT_EQ(out[0], 7.0f);
  }
  expect_fault(FaultKind::kCopyNotWaitedFor, memory,
               [&] { copy_through(from, out.data(), false); });
}

TEST(GpuFaults, CopyThatArrivedWithoutABarrierForTheOthers) {
  struct alignas(16) Four {
    float values[4];
  };
  std::vector<Four> in(64);
  // The threads of one warp wait together; the neighbour's copy has arrived, and is not yet seen.
  expect_fault(FaultKind::kMissingBarrier, {host::input(in)}, [&] {
    Copied& shared = shared_memory<Copied>();
    const unsigned i = thread_index();
    copy_async(&shared.values[4 * i], &in[i], /*zeros=*/false);
    close_group();
    wait_for_groups<0>();
    shuffle_xor(0.0f, 1);
    read(&shared.values[4 * (i ^ 1)]);
  });
}

TEST(GpuFaults, CopyOnItsWayWhenTheThreadEnds) {
  struct alignas(16) Four {
    float values[4];
  };
  std::vector<Four> in(64);
  expect_fault(FaultKind::kCopyNotWaitedFor, {host::input(in)}, [&] {
    Copied& shared = shared_memory<Copied>();
    copy_async(&shared.values[4 * thread_index()], &in[thread_index()], /*zeros=*/false);
    close_group();
  });
}

TEST(GpuFaults, BarrierThatSomeThreadsNeverReach) {
  expect_fault(FaultKind::kDivergentBarrier, {}, [] {
    if (thread_index() < 40) sync_threads();
  });
}

TEST(GpuFaults, BarriersAtTwoPlaces) {
  expect_fault(FaultKind::kDivergentBarrier, {}, [] {
    if (thread_index() % 2 == 0)
      sync_threads();
    else
      sync_threads();
  });
}

TEST(GpuFaults, ShuffleThatSomeLanesNeverReach) {
  expect_fault(FaultKind::kDivergentWarp, {}, [] {
    if (thread_index() % 32 != 5) shuffle_xor(1.0f, 1);
  });
}

TEST(GpuFaults, MisalignedRead) {
  std::vector<std::uint8_t> in(256);
  expect_fault(FaultKind::kMisaligned, {host::input(in)}, [&] {
    const auto address = reinterpret_cast<std::uintptr_t>(in.data());
    read_as<Words4>(reinterpret_cast<const void*>((address + 15) / 16 * 16 + 4));
  });
}

TEST(GpuFaults, SharedMemoryThatNobodyWrote) {
  expect_fault(FaultKind::kUninitialisedShared, {}, [] {
    Turned& shared = shared_memory<Turned>();
    read(&shared.values[thread_index()]);
  });
}

TEST(GpuFaults, SharedMemoryOfTheBlockBefore) {
  const auto write_in_the_first = [] {
    Turned& shared = shared_memory<Turned>();
    if (block_index_x() == 0) write(&shared.values[thread_index()], 1.0f);
    if (block_index_x() == 1) read(&shared.values[thread_index()]);
  };
  try {
    host::launch(Grid{2, 1, 64}, {}, Order::kAscending, write_in_the_first);
    ADD_FAILURE() << "no fault";
  } catch (const KernelFault& fault) {
    EXPECT_EQ(fault.kind(), FaultKind::kUninitialisedShared) << fault.what();
  }
}

TEST(GpuFaults, SharedMemoryOutOfBounds) {
  expect_fault(FaultKind::kSharedOutOfBounds, {}, [] {
    Turned& shared = shared_memory<Turned>();
    float* const first = shared.values;
    write(first + thread_index() + 1, 0.0f);
  });
}

TEST(GpuFaults, GlobalMemoryOutOfBounds) {
  std::vector<float> in(63), out(64);
  expect_fault(FaultKind::kGlobalOutOfBounds, {host::input(in), host::output(out)},
               [&] { write(&out[thread_index()], read(in.data() + thread_index())); });
  expect_fault(FaultKind::kGlobalOutOfBounds, {host::output(out)},
               [&] { write(out.data() + thread_index() + 1, 0.0f); });
}

TEST(GpuFaults, WriteToAnInput) {
  std::vector<float> in(64);
  expect_fault(FaultKind::kReadOnly, {host::input(in)},
               [&] { write(in.data() + thread_index(), 0.0f); });
}

}  // namespace
}  // namespace monograph::gpu
