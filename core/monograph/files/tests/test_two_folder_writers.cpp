// Two processes make one folder at once, each stopped before each of its calls while the other
// runs.
#include <gtest/gtest.h>

#include "monograph/files/atomic_file.h"
#include "monograph/files/staged_folder.h"
#include "monograph/files/tests/pausing_file_ops.h"
#include "monograph/files/tests/temporary_folder.h"

namespace monograph::files {
namespace {

namespace fs = std::filesystem;

bool write(const fs::path& target, const std::string& text, FileOps& ops) {
  StagedFolder folder(target, Existing::kReplace, {}, ops);
  // The files by the plain calls: the other process meets this one at the folder's own.
  write_all(folder.path() / "config.json", text);
  write_all(folder.path() / (text + ".safetensors"), text);
  folder.commit();
  return true;
}

// "old", "a" or "b" if the folder is whole, else what is wrong.
std::string state_of(const fs::path& target) {
  const std::string text = read_all(target / "config.json");
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(target)) ++files;
  const bool whole =
      text == "old" ? files == 1 : files == 2 && read_all(target / (text + ".safetensors")) == text;
  return whole ? text : "torn: " + text + ", " + std::to_string(files) + " files";
}

TEST(TwoFolderWriters, TheFolderIsWholeWhereverTheyMeet) {
  const TemporaryFolder folder;
  const fs::path target = folder / "out", staging = folder / ".out.partial";
  int both = 0, one = 0;
  const int rounds = pause_at_each_call(
      [&](FileOps& ops) { return write(target, "a", ops); },
      [&](FileOps& ops) { return write(target, "b", ops); },
      [&] {
        fs::remove_all(target);
        fs::create_directory(target);
        write_all(target / "config.json", "old");
      },
      [&](const PausedProcess& a, const PausedProcess& b, const std::string& where) {
        SCOPED_TRACE(where);
        EXPECT_TRUE(a.wrote() || a.refused());
        EXPECT_TRUE(b.wrote() || b.refused());
        const std::string found = state_of(target);
        EXPECT_TRUE((a.wrote() && found == "a") || (b.wrote() && found == "b")) << found;
        EXPECT_FALSE(fs::exists(staging));
        both += a.wrote() && b.wrote();
        one += a.wrote() != b.wrote();
      });
  EXPECT_GT(rounds, 300);
  EXPECT_GT(both, 0);  // one after the other
  EXPECT_GT(one, 0);   // at once: one is refused
}

// The second has opened the staging folder of the first, which ends; the third has made its own of
// the same name when the second goes on.
TEST(TwoFolderWriters, AFolderThatWasRemovedIsNotTheOneThatHasItsName) {
  const TemporaryFolder folder;
  const fs::path target = folder / "out";
  const auto writer = [&](const char* text) {
    return [&, text](FileOps& ops) { return write(target, text, ops); };
  };
  constexpr int kBeforeTheLock = 2;  // mkdir, open, flock
  bool first_stopped = true;
  for (int i = 0; first_stopped; ++i) {
    bool third_stopped = true;
    for (int k = 0; third_stopped; ++k) {
      SCOPED_TRACE("the first stops at call " + std::to_string(i) + ", the third at " +
                   std::to_string(k));
      fs::remove_all(target);
      PausedProcess first(i, writer("a")), second(kBeforeTheLock, writer("b"));
      first_stopped = first.stopped();
      first.finish();
      PausedProcess third(k, writer("c"));
      third_stopped = third.stopped();
      second.finish();
      third.finish();
      const std::string found = state_of(target);
      const PausedProcess& owner = found == "a" ? first : found == "b" ? second : third;
      EXPECT_TRUE(owner.wrote()) << found;
      EXPECT_TRUE(found == "a" || found == "b" || found == "c") << found;
      // Whoever was told that it wrote last is the one that is there.
      EXPECT_TRUE(!third.wrote() || found == "c" || second.wrote()) << found;
      EXPECT_FALSE(fs::exists(folder / ".out.partial"));
    }
  }
}

}  // namespace
}  // namespace monograph::files
