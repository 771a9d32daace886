#include "monograph/read_ahead/read_ahead.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <map>
#include <string>
#include <system_error>
#include <utility>

#include "monograph/base/error.h"

namespace monograph {
namespace {

// Long enough for a disk to be busy, short enough for somebody who waits for another piece.
constexpr std::size_t kPiece = std::size_t{16} << 20;
constexpr std::size_t kMostEvents = std::size_t{1} << 16;
// What statfs() calls file systems whose disk is memory.
constexpr std::array<std::uint32_t, 2> kTmpfsAndRamfs = {0x01021994, 0x858458f6};

// Before anything is made of the sizes.
std::vector<MappedTensor> checked(std::vector<MappedTensor> tensors) {
  if (tensors.empty()) throw Error("no tensors, wanted one at least");
  for (const MappedTensor& tensor : tensors) {
    const MappedBytes& range = tensor.range;
    struct stat found {};
    struct statfs system {};
    if (fstat(range.file, &found) != 0 || fstatfs(range.file, &system) != 0)
      throw Error("file " + std::to_string(range.file) +
                  " cannot be looked at: " + std::generic_category().message(errno));
    if (std::find(kTmpfsAndRamfs.begin(), kTmpfsAndRamfs.end(),
                  static_cast<std::uint32_t>(system.f_type)) != kTmpfsAndRamfs.end())
      throw Error(name_of_file(range.file) +
                  " lies in memory (tmpfs) and cannot be let go, wanted a file on a disk");
    const auto size = static_cast<std::size_t>(found.st_size);
    if (range.bytes == 0 || range.offset > size || range.bytes > size - range.offset ||
        range.address > std::numeric_limits<std::uintptr_t>::max() - range.bytes)
      throw Error(name_of_file(range.file) + " has " + std::to_string(size) + " bytes, wanted " +
                  std::to_string(range.bytes) + " from " + std::to_string(range.offset) + " on");
  }
  return tensors;
}

std::vector<Piece> cut(const std::vector<MappedTensor>& tensors, std::vector<MappedBytes>& ranges,
                       std::vector<std::size_t>& first) {
  std::vector<Piece> pieces;
  for (const MappedTensor& tensor : tensors) {
    first.push_back(pieces.size());
    for (std::size_t at = 0; at < tensor.range.bytes; at += kPiece) {
      const MappedBytes& whole = tensor.range;
      const std::size_t bytes = std::min(kPiece, whole.bytes - at);
      ranges.push_back({whole.address + at, bytes, whole.file, whole.offset + at});
      pieces.push_back({tensor.unit, bytes, tensor.reading});
    }
  }
  first.push_back(pieces.size());
  return pieces;
}

std::size_t unit_count(const std::vector<MappedTensor>& tensors) {
  std::size_t count = 1;
  for (const MappedTensor& tensor : tensors) count = std::max(count, tensor.unit + 1);
  return count;
}

std::size_t largest_unit(const std::vector<MappedTensor>& tensors) {
  std::vector<std::size_t> bytes(unit_count(tensors));
  for (const MappedTensor& tensor : tensors)
    if (tensor.reading != Reading::kScattered) bytes[tensor.unit] += tensor.range.bytes;
  return *std::max_element(bytes.begin(), bytes.end());
}

}  // namespace

ReadAhead::ReadAhead(std::vector<MappedTensor> tensors, std::size_t allowed, const PageCalls& calls)
    : tensors_(checked(std::move(tensors))),
      calls_(calls),
      files_of_unit_(unit_count(tensors_)),
      schedule_(cut(tensors_, ranges_, first_piece_), unit_count(tensors_), allowed) {
  const std::size_t least = largest_unit(tensors_) + 2 * kPiece;
  if (allowed < least)
    throw Error("base_memory is " + std::to_string(allowed) + " bytes, wanted at least " +
                std::to_string(least) + ": the largest layer, or the head, and " +
                std::to_string(2 * kPiece >> 20) + " MiB beside it");
  std::map<int, std::size_t> known;
  for (MappedTensor& tensor : tensors_) {
    const auto [place, is_new] = known.try_emplace(tensor.range.file, files_.size());
    if (is_new) files_.emplace_back(tensor.range.file);
    tensor.range.file = files_[place->second].number;
    std::vector<std::size_t>& of_unit = files_of_unit_[tensor.unit];
    if (std::find(of_unit.begin(), of_unit.end(), place->second) == of_unit.end())
      of_unit.push_back(place->second);
  }
  for (std::size_t i = 0; i < tensors_.size(); ++i)
    for (std::size_t piece = first_piece_[i]; piece < first_piece_[i + 1]; ++piece)
      ranges_[piece].file = tensors_[i].range.file;
  numbers_.allowed = allowed;
  for (const MappedTensor& tensor : tensors_)
    if (tensor.reading != Reading::kWhole) read_no_neighbours(tensor.range);
  // What loading has touched, and what is in the cache from before: held is 0 now.
  for (const MappedBytes& range : ranges_) calls_.drop(range);
}

ReadAhead::File::File(int of) : number(fcntl(of, F_DUPFD_CLOEXEC, 0)) {
  struct stat found {};
  if (number < 0 || fstat(number, &found) != 0) {
    const int why = errno;
    if (number >= 0) close(number);
    throw Error(name_of_file(of) +
                " cannot be opened again: " + std::generic_category().message(why));
  }
  size = found.st_size;
  seconds = found.st_mtim.tv_sec;
  nanoseconds = found.st_mtim.tv_nsec;
}

ReadAhead::File::~File() { close(number); }

ReadAhead::~ReadAhead() { stop(); }

void ReadAhead::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  progress_.notify_all();
  arrived_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void ReadAhead::check_files(std::size_t unit) const {
  for (const std::size_t i : files_of_unit_[unit]) {
    const File& file = files_[i];
    struct stat found {};
    if (fstat(file.number, &found) != 0) continue;
    if (found.st_size != file.size)
      throw Error(name_of_file(file.number) + " has " + std::to_string(found.st_size) +
                  " bytes, wanted " + std::to_string(file.size) +
                  ": it was changed while the base is mapped from it");
    if (found.st_mtim.tv_sec != file.seconds || found.st_mtim.tv_nsec != file.nanoseconds)
      throw Error(name_of_file(file.number) + " was written at " +
                  std::to_string(found.st_mtim.tv_sec) + ", wanted the file of " +
                  std::to_string(file.seconds) +
                  " (seconds since 1970): the base is mapped from it");
  }
}

void ReadAhead::use(std::size_t tensor) {
  const std::size_t unit = tensors_[tensor].unit;
  std::unique_lock lock(mutex_);
  if (stop_) return;
  if (failure_) std::rethrow_exception(failure_);
  if (!thread_.joinable()) {
    start_ = std::chrono::steady_clock::now();
    thread_ = std::thread([this] { work(); });
  }
  if (unit != schedule_.current()) {
    try {
      check_files(unit);
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
    schedule_.use(unit);
    ++steps_since_measured_;
    record(ReadAheadEvent::Kind::kUse, unit, now(), 0);
    progress_.notify_one();
  }
  for (std::size_t piece = first_piece_[tensor]; piece < first_piece_[tensor + 1]; ++piece)
    schedule_.use_piece(piece);
  if (tensors_[tensor].reading == Reading::kScattered || !missing_of(tensor)) return;
  const std::int64_t began = now();
  while (!failure_ && !stop_ && missing_of(tensor)) {
    // Of two that wait the first one gets all of its tensor: they could take each other's.
    if (!wanted_) wanted_ = tensor;
    progress_.notify_one();
    arrived_.wait(lock);
  }
  numbers_.waited += now() - began;
  record(ReadAheadEvent::Kind::kWait, unit, began, tensors_[tensor].range.bytes);
  if (failure_) std::rethrow_exception(failure_);
}

std::optional<std::size_t> ReadAhead::missing_of(std::size_t tensor) const {
  for (std::size_t piece = first_piece_[tensor]; piece < first_piece_[tensor + 1]; ++piece)
    if (!schedule_.is_complete(piece)) return piece;
  return {};
}

void ReadAhead::work() {
  std::unique_lock lock(mutex_);
  try {
    while (!stop_) {
      std::optional<std::size_t> piece;
      if (wanted_) piece = missing_of(*wanted_);
      if (!piece) wanted_.reset();
      // Once a pass: what operators that do not tell have read.
      if (!piece && steps_since_measured_ >= files_of_unit_.size()) measure(lock);
      const Schedule::Action action = schedule_.next(piece);
      if (action.kind == Schedule::Kind::kNothing)
        progress_.wait(lock);
      else
        carry_out(lock, action);
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    failure_ = std::current_exception();
    arrived_.notify_all();
  }
}

void ReadAhead::carry_out(std::unique_lock<std::mutex>& lock, const Schedule::Action& action) {
  const MappedBytes range = ranges_[action.piece];
  const std::size_t unit = schedule_.pieces()[action.piece].unit;
  const bool reads = action.kind == Schedule::Kind::kRead;
  const bool is_there = schedule_.is_complete(action.piece);
  const std::int64_t began = now();
  lock.unlock();
  (reads ? calls_.read : calls_.drop)(range);
  lock.lock();
  schedule_.set_held(action.piece, reads ? range.bytes : 0);
  numbers_.most_held = std::max(numbers_.most_held, schedule_.held());
  if (reads) arrived_.notify_all();
  if (reads && is_there) return;
  (reads ? numbers_.read : numbers_.dropped) += range.bytes;
  record(reads ? ReadAheadEvent::Kind::kRead : ReadAheadEvent::Kind::kDrop, unit, began,
         range.bytes);
}

void ReadAhead::measure(std::unique_lock<std::mutex>& lock) {
  steps_since_measured_ = 0;
  for (std::size_t i = 0; i < ranges_.size() && !stop_; ++i) {
    if (schedule_.is_complete(i)) continue;
    lock.unlock();
    const std::size_t held = calls_.held(ranges_[i]);
    lock.lock();
    schedule_.set_held(i, std::min(held, ranges_[i].bytes));
    numbers_.most_held = std::max(numbers_.most_held, schedule_.held());
  }
}

ReadAheadNumbers ReadAhead::numbers() const {
  const std::lock_guard lock(mutex_);
  ReadAheadNumbers numbers = numbers_;
  numbers.held = schedule_.held();
  return numbers;
}

std::vector<ReadAheadEvent> ReadAhead::events() const {
  const std::lock_guard lock(mutex_);
  return events_;
}

std::int64_t ReadAhead::now() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() -
                                                              start_)
      .count();
}

void ReadAhead::record(ReadAheadEvent::Kind kind, std::size_t unit, std::int64_t begin,
                       std::size_t bytes) {
  if (events_.size() < kMostEvents) events_.push_back({kind, unit, begin, now(), bytes});
}

}  // namespace monograph
