// A base larger than memory: a thread that reads the bytes of a model before they are used and lets
// go of those that are used last, told by the operators how far the model is.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "monograph/read_ahead/mapped_pages.h"
#include "monograph/read_ahead/schedule.h"

namespace monograph {

// A tensor in a mapped file. Units are numbered in the order in which a forward pass uses them.
struct MappedTensor {
  MappedBytes range;
  std::size_t unit = 0;
  Reading reading = Reading::kWhole;
};

// What happened, for pictures. Times in ns since the first use.
struct ReadAheadEvent {
  enum class Kind { kUse, kWait, kRead, kDrop };
  Kind kind;
  std::size_t unit;
  std::int64_t begin, end;
  std::size_t bytes;
};

// most_held may be over allowed: by what operators that do not tell read in one pass.
struct ReadAheadNumbers {
  std::size_t allowed, held, most_held, read, dropped;
  std::int64_t waited;  // ns that operators waited
};

// The calls to the system; tests have their own.
struct PageCalls {
  void (*read)(const MappedBytes&) = read_pages;
  void (*drop)(const MappedBytes&) = drop_pages;
  std::size_t (*held)(const MappedBytes&) = held_pages;
};

class ReadAhead {
 public:
  // The files must be open; they are opened a second time. Throws Error if `allowed` is less than a
  // unit and what is read beside it, if a range is not in its file, or if a file lies in memory.
  ReadAhead(std::vector<MappedTensor> tensors, std::size_t allowed, const PageCalls& calls = {});
  // Waits for the piece that is being read.
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Waits for the piece that is being read. Nothing is read or let go afterwards; use() returns at
  // once, and releases those that wait.
  void stop();

  // A tensor, by its place in the list, is about to be read: returns when it is in memory. The
  // first call starts the thread. Throws Error if it failed, or if a file of the unit has changed
  // since it was opened.
  void use(std::size_t tensor);

  ReadAheadNumbers numbers() const;
  std::vector<ReadAheadEvent> events() const;
  std::span<const MappedTensor> tensors() const { return tensors_; }

 private:
  // A descriptor of its own.
  struct File {
    explicit File(int of);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int number = -1;
    std::int64_t size = 0, seconds = 0, nanoseconds = 0;
  };
  void check_files(std::size_t unit) const;
  void work();
  void carry_out(std::unique_lock<std::mutex>& lock, const Schedule::Action& action);
  void measure(std::unique_lock<std::mutex>& lock);
  std::optional<std::size_t> missing_of(std::size_t tensor) const;
  std::int64_t now() const;
  void record(ReadAheadEvent::Kind kind, std::size_t unit, std::int64_t begin, std::size_t bytes);

  std::vector<MappedTensor> tensors_;
  PageCalls calls_;
  std::vector<MappedBytes> ranges_;       // of the pieces
  std::vector<std::size_t> first_piece_;  // of each tensor, and one behind the last
  std::deque<File> files_;
  std::vector<std::vector<std::size_t>> files_of_unit_;

  mutable std::mutex mutex_;
  std::condition_variable progress_, arrived_;
  Schedule schedule_;
  std::optional<std::size_t> wanted_;  // a tensor that somebody waits for
  std::size_t steps_since_measured_ = 0;
  bool stop_ = false;
  std::exception_ptr failure_;
  ReadAheadNumbers numbers_{};
  std::vector<ReadAheadEvent> events_;
  std::chrono::steady_clock::time_point start_;
  std::thread thread_;
};

}  // namespace monograph
