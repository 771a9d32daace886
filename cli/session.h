// What every subcommand is given: how to talk to the person, and whether to stop.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

namespace monograph::cli {

// SIGINT or SIGTERM arrived. It unwinds the stack, so that temporary files are removed on the way.
class Interrupted : public std::runtime_error {
 public:
  explicit Interrupted(int signal) : std::runtime_error("interrupted"), signal_(signal) {}
  int signal() const { return signal_; }

 private:
  int signal_;
};

// From now on SIGINT and SIGTERM are noted instead of ending the program. A second one ends it.
void catch_signals();
// Throws Interrupted if a signal was noted. Thread safe.
void throw_if_interrupted();

class Session {
 public:
  bool quiet = false;

  // Notes and warnings go to stderr; results go to stdout. `note` is silent under --quiet.
  void note(const std::string& text) const;
  void warn(const std::string& text) const;
  // Called with the bytes of each piece done, from any thread: draws the bar if stderr is a
  // terminal and --quiet was not given, and throws Interrupted after a signal. The bar ends with
  // the last copy of the function.
  std::function<void(std::uint64_t)> progress(const std::string& label,
                                              std::uint64_t total_bytes) const;
};

// The bar as text, at most `width` columns: label, bar, share, bytes, throughput, time left.
std::string progress_line(const std::string& label, std::uint64_t done_bytes,
                          std::uint64_t total_bytes, double seconds, int width);

// "1.5 GB": decimal units, three digits, as disks and file managers count.
std::string bytes_text(std::uint64_t bytes);

}  // namespace monograph::cli
