// A second process that stops before its k-th call, so that another one can run meanwhile.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

#include "monograph/files/file_ops.h"

namespace monograph::files {

// Stops the process before call number `at`, from 0, until it gets SIGCONT. Nothing is synced: no
// test here outlives the machine.
class PausingFileOps : public FileOps {
 public:
  explicit PausingFileOps(int at) : at_(at) {}
  int open(const char* path, int flags, mode_t mode) override {
    return pause(), FileOps::open(path, flags, mode);
  }
  int close(int fd) override { return pause(), FileOps::close(fd); }
  int stat(const char* path, struct stat* status) override {
    return pause(), FileOps::stat(path, status);
  }
  int fstat(int fd, struct stat* status) override { return pause(), FileOps::fstat(fd, status); }
  int fchmod(int fd, mode_t mode) override { return pause(), FileOps::fchmod(fd, mode); }
  int flock(int fd, int operation) override { return pause(), FileOps::flock(fd, operation); }
  int fallocate(int fd, std::uint64_t size_bytes) override {
    return pause(), FileOps::fallocate(fd, size_bytes);
  }
  ssize_t pwrite(int fd, const void* data, std::size_t size, std::uint64_t offset) override {
    return pause(), FileOps::pwrite(fd, data, size, offset);
  }
  int fsync(int /*fd*/) override { return pause(), 0; }
  int rename(const char* from, const char* to) override {
    return pause(), FileOps::rename(from, to);
  }
  int unlink(const char* path) override { return pause(), FileOps::unlink(path); }
  int mkdir(const char* path, mode_t mode) override { return pause(), FileOps::mkdir(path, mode); }
  int rmdir(const char* path) override { return pause(), FileOps::rmdir(path); }
  int exchange(const char* one, const char* other) override {
    return pause(), FileOps::exchange(one, other);
  }

  int calls() const { return calls_; }

 private:
  void pause() {
    if (calls_++ == at_) ::raise(SIGSTOP);
  }
  int at_, calls_ = 0;
};

// Runs body(ops) in a process of its own, which stops before call number `at`.
class PausedProcess {
 public:
  // `body` returns whether it wrote its target; false or an Error if it was refused.
  PausedProcess(int at, const std::function<bool(FileOps&)>& body) {
    id_ = ::fork();
    if (id_ != 0) {
      wait_for(WUNTRACED);
      return;
    }
    int code = kRefused;
    try {
      PausingFileOps ops(at);
      code = body(ops) ? kWritten : kRefused;
    } catch (const Error&) {
    } catch (...) {
      code = kBroken;
    }
    ::_exit(code);
  }
  bool stopped() const { return WIFSTOPPED(status_); }
  // Lets it go on to its end.
  void finish() {
    if (!stopped()) return;
    ::kill(id_, SIGCONT);
    wait_for(0);
  }
  // After its end.
  bool wrote() const { return WIFEXITED(status_) && WEXITSTATUS(status_) == kWritten; }
  bool refused() const { return WIFEXITED(status_) && WEXITSTATUS(status_) == kRefused; }

 private:
  static constexpr int kWritten = 0, kRefused = 1, kBroken = 2;
  void wait_for(int flags) { ::waitpid(id_, &status_, flags); }

  pid_t id_ = 0;
  int status_ = 0;
};

// a stops before each of its calls, b before each of its own, a goes on to its end, then b; and the
// other order. check(a, b) after each round; reset() before it.
inline int pause_at_each_call(const std::function<bool(FileOps&)>& a,
                              const std::function<bool(FileOps&)>& b,
                              const std::function<void()>& reset,
                              const std::function<void(const PausedProcess&, const PausedProcess&,
                                                       const std::string& where)>& check) {
  int rounds = 0;
  for (int i = 0;; ++i) {
    for (int j = 0;; ++j) {
      bool a_stopped = false, b_stopped = false;
      for (const bool a_first : {true, false}) {
        reset();
        PausedProcess first(i, a), second(j, b);
        a_stopped = first.stopped();
        b_stopped = second.stopped();
        (a_first ? first : second).finish();
        (a_first ? second : first).finish();
        check(first, second,
              "a stops at call " + std::to_string(i) + ", b at " + std::to_string(j) +
                  (a_first ? ", a goes on" : ", b goes on"));
        ++rounds;
      }
      if (!a_stopped) return rounds;
      if (!b_stopped) break;
    }
  }
}

}  // namespace monograph::files
