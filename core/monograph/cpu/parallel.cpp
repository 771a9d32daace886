#include "monograph/cpu/parallel.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "monograph/cpu/pause.h"

namespace monograph {
namespace {

constexpr int kSpins = 2000;  // 30 to 120 us

// Until `value` is another than `old`; the value it has then.
std::uint32_t wait_for_other(const std::atomic<std::uint32_t>& value, std::uint32_t old,
                             int spins) {
  for (int i = 0; i < spins; ++i) {
    const std::uint32_t now = value.load(std::memory_order_acquire);
    if (now != old) return now;
    pause_core();
  }
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  // A thread without a core of its own would take the time of those that have work.
  if (threads <= static_cast<int>(std::thread::hardware_concurrency())) spins_ = kSpins;
  workers_.reserve(static_cast<std::size_t>(std::max(threads, 1)));
  try {
    for (int i = 1; i < threads; ++i)
      workers_.emplace_back([this, i] { work(static_cast<std::size_t>(i)); });
  } catch (const std::system_error&) {
    // The system gives no more threads: those that run do the work.
  } catch (const std::bad_alloc&) {
  }
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::parallel_for(std::size_t count, std::size_t grain, ParallelBody body) {
  if (count == 0) return;
  const std::size_t smallest = std::max<std::size_t>(grain, 1);
  const std::size_t wanted =
      std::min(workers_.size() + 1, std::max<std::size_t>(count / smallest, 1));
  if (wanted == 1) return body(0, count);
  const std::size_t chunk = (count + wanted - 1) / wanted;
  body_ = &body;
  count_ = count;
  chunk_ = chunk;
  ranges_ = (count + chunk - 1) / chunk;
  pending_.store(static_cast<std::uint32_t>(workers_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  run_range(0);
  std::uint32_t left = pending_.load(std::memory_order_acquire);
  while (left != 0) left = wait_for_other(pending_, left, spins_);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ThreadPool::work(std::size_t index) {
  std::uint32_t seen = 0;
  while (true) {
    seen = wait_for_other(round_, seen, spins_);
    if (stop_) return;
    run_range(index);
    if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_one();
  }
}

void ThreadPool::run_range(std::size_t index) {
  if (index >= ranges_) return;
  try {
    (*body_)(index * chunk_, std::min(count_, (index + 1) * chunk_));
  } catch (...) {
    const std::lock_guard lock(failure_mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

}  // namespace monograph
