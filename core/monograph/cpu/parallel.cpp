#include "monograph/cpu/parallel.h"

#include <algorithm>
#include <new>
#include <system_error>

namespace monograph {

ThreadPool::ThreadPool(int threads) {
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
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::parallel_for(std::size_t count, std::size_t grain, ParallelBody body) {
  if (count == 0) return;
  const std::size_t smallest = std::max<std::size_t>(grain, 1);
  const std::size_t wanted =
      std::min(workers_.size() + 1, std::max<std::size_t>(count / smallest, 1));
  const std::size_t chunk = (count + wanted - 1) / wanted;
  {
    const std::lock_guard lock(mutex_);
    body_ = &body;
    count_ = count;
    chunk_ = chunk;
    ranges_ = (count + chunk - 1) / chunk;
    pending_ = workers_.size();
    failure_ = nullptr;
    ++round_;
  }
  start_.notify_all();
  run_range(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return pending_ == 0; });
  if (failure_) std::rethrow_exception(failure_);
}

void ThreadPool::work(std::size_t index) {
  std::uint64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
    }
    run_range(index);
    const std::lock_guard lock(mutex_);
    if (--pending_ == 0) done_.notify_one();
  }
}

void ThreadPool::run_range(std::size_t index) {
  if (index >= ranges_) return;
  try {
    (*body_)(index * chunk_, std::min(count_, (index + 1) * chunk_));
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

}  // namespace monograph
