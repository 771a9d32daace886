#include "session.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>

#include "program_name.h"

namespace monograph::cli {
namespace {

// The number of the signal, 0 for none. Lock-free, so that a handler may write it.
std::atomic<int> noted_signal = 0;
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void note_signal(int signal) { noted_signal = signal; }

int terminal_width() {
  struct winsize size {};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

class Bar {
 public:
  Bar(std::string label, std::uint64_t total_bytes)
      : label_(std::move(label)), total_(total_bytes) {
    draw();
  }
  ~Bar() {
    draw();
    std::fputc('\n', stderr);
  }
  Bar(const Bar&) = delete;
  Bar& operator=(const Bar&) = delete;

  void add(std::uint64_t bytes) {
    done_ += bytes;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    // Ten times a second; a thread that finds another one drawing goes on working.
    if (lock.owns_lock() && Clock::now() - drawn_ > std::chrono::milliseconds(100)) draw();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void draw() {
    drawn_ = Clock::now();
    const double seconds = std::chrono::duration<double>(drawn_ - start_).count();
    const std::string line = progress_line(label_, done_, total_, seconds, terminal_width() - 1);
    std::fprintf(stderr, "\r%s\033[K", line.c_str());
    std::fflush(stderr);
  }

  std::string label_;
  std::uint64_t total_;
  std::atomic<std::uint64_t> done_ = 0;
  Clock::time_point start_ = Clock::now(), drawn_ = start_;
  std::mutex mutex_;  // of drawing
};

std::string time_text(double seconds) {
  const auto whole = static_cast<long>(std::min(seconds, 359'999.0));
  std::array<char, 32> text{};
  if (whole >= 3600) {
    std::snprintf(text.data(), text.size(), "%ld:%02ld:%02ld", whole / 3600, whole / 60 % 60,
                  whole % 60);
  } else {
    std::snprintf(text.data(), text.size(), "%ld:%02ld", whole / 60, whole % 60);
  }
  return text.data();
}

}  // namespace

void catch_signals() {
  struct sigaction action {};
  action.sa_handler = note_signal;
  // The second signal finds the default again: a person can always get out.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  // A write beyond `ulimit -f` fails with EFBIG then, and the file is named.
  ::signal(SIGXFSZ, SIG_IGN);
}

void throw_if_interrupted() {
  if (const int signal = noted_signal; signal != 0) throw Interrupted(signal);
}

void Session::note(const std::string& text) const {
  if (!quiet) std::fprintf(stderr, "%s\n", as_called(text).c_str());
}

void Session::warn(const std::string& text) const {
  std::fprintf(stderr, "%s: warning: %s\n", program_name(), as_called(text).c_str());
}

std::function<void(std::uint64_t)> Session::progress(const std::string& label,
                                                     std::uint64_t total_bytes) const {
  if (quiet || ::isatty(STDERR_FILENO) == 0) return [](std::uint64_t) { throw_if_interrupted(); };
  return [bar = std::make_shared<Bar>(label, total_bytes)](std::uint64_t bytes) {
    throw_if_interrupted();
    bar->add(bytes);
  };
}

std::string progress_line(const std::string& label, std::uint64_t done_bytes,
                          std::uint64_t total_bytes, double seconds, int width) {
  const double share =
      total_bytes == 0 ? 1.0 : static_cast<double>(done_bytes) / static_cast<double>(total_bytes);
  std::array<char, 32> percent{};
  std::snprintf(percent.data(), percent.size(), "%3d %%", static_cast<int>(share * 100));
  std::string right = std::string(" ") + percent.data() + "  " + bytes_text(done_bytes) + " of " +
                      bytes_text(total_bytes);
  if (seconds > 0.02 && done_bytes > 0) {
    const double rate = static_cast<double>(done_bytes) / seconds;
    const double left = static_cast<double>(total_bytes - std::min(done_bytes, total_bytes)) / rate;
    right += "  " + bytes_text(static_cast<std::uint64_t>(rate)) + "/s  " +
             (done_bytes < total_bytes ? time_text(left) + " left" : time_text(seconds));
  }
  std::string line = label + " ";
  const int room = width - static_cast<int>(line.size() + right.size()) - 2;
  if (room >= 8) {
    const int bar = std::min(room, 40), full = static_cast<int>(share * bar);
    line += "[" + std::string(static_cast<std::size_t>(full), '=') +
            std::string(static_cast<std::size_t>(bar - full), ' ') + "]";
  }
  line += right;
  return line.substr(0, static_cast<std::size_t>(std::max(width, 0)));
}

std::string bytes_text(std::uint64_t bytes) {
  constexpr std::array kUnits = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  // 999.5 would be printed as 1000.
  for (; value >= 999.5 && unit + 1 < kUnits.size(); ++unit) value /= 1000;
  std::array<char, 32> text{};
  const int digits = unit == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  std::snprintf(text.data(), text.size(), "%.*f %s", digits, value, kUnits[unit]);
  return text.data();
}

}  // namespace monograph::cli
