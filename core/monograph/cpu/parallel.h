// Parallelism is an argument: torch's pool inside torch, the pool below in the tool and the tests.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "monograph/base/function_ref.h"

namespace monograph {

// body(begin, end) handles the units [begin, end). Ranges do not overlap and cover [0, count).
using ParallelBody = FunctionRef<void(std::size_t, std::size_t)>;

// Calls body on ranges that together are [0, count), on any number of threads, and returns when all
// are done. No range but the last is shorter than `grain`. A kernel's result must not depend on the
// ranges. A body may throw: the caller gets the first exception after every range has ended.
using ParallelFor = FunctionRef<void(std::size_t count, std::size_t grain, ParallelBody body)>;

// Everything on the calling thread.
inline constexpr struct SerialFor {
  void operator()(std::size_t count, std::size_t /*grain*/, ParallelBody body) const {
    if (count != 0) body(0, count);
  }
} serial_for;

// Threads, fewer if the system gives no more; one parallel_for at a time, from one thread. Between
// two calls a thread waits awake for about as long as it takes to wake one, then it sleeps: a
// training step makes ten thousand calls a second.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The first exception that a body throws is rethrown here after every range has ended.
  void parallel_for(std::size_t count, std::size_t grain, ParallelBody body);
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  void work(std::size_t index);
  void run_range(std::size_t index);

  // A call is written before its round is counted, and read by a worker that has seen the count.
  std::atomic<std::uint32_t> round_ = 0, pending_ = 0;
  std::size_t ranges_ = 0, count_ = 0, chunk_ = 0;
  const ParallelBody* body_ = nullptr;
  bool stop_ = false;
  int spins_ = 0;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
  std::vector<std::thread> workers_;
};

}  // namespace monograph
