// The spill file: what is read is what was written, or an error that names the file.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "monograph/files/list_folder.h"
#include "monograph/files/spill_file.h"
#include "monograph/files/tests/faulty_file_ops.h"
#include "monograph/files/tests/temporary_folder.h"

namespace monograph::files {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes bytes(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  Bytes made(size);
  for (auto& b : made) b = static_cast<std::uint8_t>(random());
  return made;
}

Bytes back(const SpillFile& file, const SpillFile::Extent& extent) {
  Bytes found(extent.size_bytes);
  file.read(extent, found);
  return found;
}

bool names(const std::string& message, const SpillFile& file) {
  return message.find(file.path().string()) != std::string::npos;
}

TEST(SpillFile, GivesBackWhatWasWrittenInAnyOrder) {
  const TemporaryFolder folder;
  SpillFile file(folder.path());
  std::vector<std::pair<Bytes, SpillFile::Extent>> kept;
  std::mt19937 random(3);
  for (unsigned round = 0; round < 200; ++round) {
    if (kept.size() > 8) {
      const std::size_t i = random() % kept.size();
      EXPECT_EQ(back(file, kept[i].second), kept[i].first);
      file.release(kept[i].second);
      kept.erase(kept.begin() + static_cast<long>(i));
    }
    Bytes made = bytes(random() % 20000, round);
    const auto extent = file.write(made);
    kept.emplace_back(std::move(made), extent);
  }
  for (const auto& [want, extent] : kept) EXPECT_EQ(back(file, extent), want);
  for (const auto& [want, extent] : kept) file.release(extent);
  EXPECT_EQ(file.write(bytes(5, 1)).offset_bytes, 0u);  // all space came back
}

TEST(SpillFile, ThreadsDoNotMeet) {
  const TemporaryFolder folder;
  SpillFile file(folder.path());
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (unsigned i = 0; i < 50; ++i) {
        const Bytes want = bytes(1 + i * 131, t * 1000 + i);
        const auto extent = file.write(want);
        if (back(file, extent) != want) ++wrong;
        file.release(extent);
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(SpillFile, AFullDiskIsAnErrorThatNamesTheFileAndLosesNothing) {
  const TemporaryFolder folder;
  FaultyFileOps ops;
  SpillFile file(folder.path(), ops);
  const Bytes first = bytes(10000, 1);
  const auto kept = file.write(first);
  for (const Call kind : {Call::kReserve, Call::kPwrite}) {
    ops.fail(kind, 0, ENOSPC);
    const std::string message = error_of([&] { file.write(bytes(20000, 2)); });
    EXPECT_TRUE(names(message, file)) << message;
    EXPECT_NE(message.find("No space left"), std::string::npos) << message;
  }
  const auto next = file.write(bytes(20000, 2));
  EXPECT_EQ(next.offset_bytes, 12288u);  // the space of the failed writes is free
  EXPECT_EQ(back(file, kept), first);
}

TEST(SpillFile, ShortWritesAndReadsAreContinued) {
  const TemporaryFolder folder;
  FaultyFileOps ops;
  SpillFile file(folder.path(), ops);
  ops.shorten_writes(777);
  ops.shorten_reads(501);
  const Bytes want = bytes(10000, 1);
  EXPECT_EQ(back(file, file.write(want)), want);
  EXPECT_GT(ops.count(Call::kPread), 10);
}

TEST(SpillFile, InterruptedCallsAreMadeAgainAndFailedReadsNamed) {
  const TemporaryFolder folder;
  FaultyFileOps ops;
  SpillFile file(folder.path(), ops);
  const Bytes want = bytes(10000, 1);
  for (const Call kind : {Call::kReserve, Call::kPwrite, Call::kPread}) {
    ops.fail(kind, 0, EINTR);
    EXPECT_EQ(back(file, file.write(want)), want);
  }
  const auto extent = file.write(want);
  ops.fail(Call::kPread, 0, EIO);
  EXPECT_TRUE(names(error_of([&] { back(file, extent); }), file));
}

TEST(SpillFile, AShortenedOrChangedFileIsAnErrorNeverOtherBytes) {
  const TemporaryFolder folder;
  SpillFile file(folder.path());
  const auto first = file.write(bytes(5000, 1)), second = file.write(bytes(5000, 2));
  for (const std::uint64_t place : {0, 2500, 4999}) {
    std::string content = read_all(file.path());
    content[first.offset_bytes + place] =
        static_cast<char>(content[first.offset_bytes + place] ^ 1);
    const int fd = ::open(file.path().c_str(), O_WRONLY);
    ASSERT_EQ(::pwrite(fd, content.data(), content.size(), 0),
              static_cast<ssize_t>(content.size()));
    const std::string message = error_of([&] { back(file, first); });
    EXPECT_NE(message.find("checksum"), std::string::npos) << message;
    EXPECT_TRUE(names(message, file));
    content[first.offset_bytes + place] =
        static_cast<char>(content[first.offset_bytes + place] ^ 1);
    ASSERT_EQ(::pwrite(fd, content.data(), content.size(), 0),
              static_cast<ssize_t>(content.size()));
    ::close(fd);
  }
  EXPECT_EQ(back(file, first), bytes(5000, 1));
  std::filesystem::resize_file(file.path(), second.offset_bytes + 100);
  const std::string message = error_of([&] { back(file, second); });
  EXPECT_NE(message.find("ends after 100 of 5000 bytes"), std::string::npos) << message;
  EXPECT_EQ(back(file, first), bytes(5000, 1));
}

TEST(SpillFile, GoesWithItsObjectAndLeftoversOfTheDeadWithTheNext) {
  const TemporaryFolder folder;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    SpillFile file(folder.path());
    file.write(bytes(100000, 1));
    (void)!::write(ready[1], "x", 1);
    ::pause();
    ::_exit(0);
  }
  char sign = 0;
  ASSERT_EQ(::read(ready[0], &sign, 1), 1);
  write_all(folder / "monograph-spill-notes.txt", "not ours");
  {
    const SpillFile beside(folder.path());  // the other process lives: its file stays
    EXPECT_EQ(list_folder(folder.path()).size(), 3u);
  }
  EXPECT_EQ(list_folder(folder.path()).size(), 2u);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(list_folder(folder.path()).size(), 2u);
  { const SpillFile next(folder.path()); }
  EXPECT_EQ(list_folder(folder.path()), std::vector<std::string>{"monograph-spill-notes.txt"});
}

TEST(SpillFile, AForkedChildNeitherWritesNorRemoves) {
  const TemporaryFolder folder;
  SpillFile file(folder.path());
  const Bytes want = bytes(5000, 1);
  const auto extent = file.write(want);
  const pid_t child = ::fork();
  if (child == 0) {
    file.release(extent);
    file.remove_name();
    const bool refused = error_of([&] { file.write(want); }).find("is a copy") != std::string::npos;
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(std::filesystem::exists(file.path()));
  EXPECT_EQ(back(file, extent), want);
}

TEST(SpillFile, WithoutLocksTheFileIsUsedAndAFailedLockLeavesNone) {
  const TemporaryFolder folder;
  FaultyFileOps ops;
  ops.fail(Call::kFlock, 0, ENOLCK);
  {
    SpillFile file(folder.path(), ops);
    EXPECT_EQ(back(file, file.write(Bytes(5000, 7))), Bytes(5000, 7));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  ops.fail(Call::kFlock, 0, EINTR);
  { const SpillFile file(folder.path(), ops); }
  ops.fail(Call::kFlock, 0, EIO);
  const std::string message = error_of([&] { SpillFile file(folder.path(), ops); });
  EXPECT_NE(message.find("cannot be locked"), std::string::npos) << message;
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

// Between opening and locking a leftover, its name goes to another file.
class RenamingOps : public FileOps {
 public:
  explicit RenamingOps(std::filesystem::path fresh) : fresh_(std::move(fresh)) {}
  int flock(int fd, int operation) override {
    if (!opened_.empty() && std::filesystem::exists(fresh_)) {
      std::filesystem::rename(fresh_, opened_);
    }
    return FileOps::flock(fd, operation);
  }
  int open(const char* path, int flags, mode_t mode) override {
    if ((flags & O_CREAT) == 0) opened_ = path;
    return FileOps::open(path, flags, mode);
  }

 private:
  std::filesystem::path fresh_, opened_;
};

TEST(SpillFile, ALeftoverWhoseNameWentToAnotherFileIsNotRemovedByThatName) {
  const TemporaryFolder folder;
  const std::filesystem::path left = folder / "monograph-spill-1-0.bin", fresh = folder / "fresh";
  write_all(left, "old");
  write_all(fresh, "new");
  RenamingOps ops(fresh);
  { const SpillFile file(folder.path(), ops); }
  EXPECT_EQ(std::filesystem::file_size(left), 3u);
}

TEST(SpillFile, AFolderThatIsNoneIsNamed) {
  const std::string message = error_of([] { SpillFile file("/no/such/folder"); });
  EXPECT_NE(message.find("/no/such/folder"), std::string::npos) << message;
}

}  // namespace
}  // namespace monograph::files
