#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "monograph/base/process_wide.h"

namespace monograph {
namespace {

struct Pair {
  int one = 0, other = 0;
};

struct Forgetful {
  int value = 0;
  void forget_parent() { value = 0; }
};

// Waits for the child; -1 if it hung and had to be killed.
int exit_code(pid_t child) {
  for (int waited = 0; waited < 2000; ++waited) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) {
      return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
    usleep(5000);
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return -1;
}

TEST(ProcessWide, AForkUnderLoadLeavesAWholeStateThatTheChildCanTake) {
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!stop) {
        const auto pair = ProcessWide<Pair>::hold();
        ++pair->one;
        std::this_thread::yield();
        ++pair->other;
      }
    });
  }
  for (int i = 0; i < 100; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      const auto pair = ProcessWide<Pair>::hold();
      _exit(pair->one == pair->other ? 0 : 1);
    }
    ASSERT_EQ(exit_code(child), 0) << "fork " << i;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

TEST(ProcessWide, TheChildForgetsAndTheParentDoesNot) {
  ProcessWide<Forgetful>::hold()->value = 7;
  const pid_t child = fork();
  if (child == 0) _exit(ProcessWide<Forgetful>::hold()->value);
  EXPECT_EQ(exit_code(child), 0);
  EXPECT_EQ(ProcessWide<Forgetful>::hold()->value, 7);
}

}  // namespace
}  // namespace monograph
