// The thread on real files: what is in memory is asked from the system.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/read_ahead/read_ahead.h"
#include "monograph/read_ahead/registry.h"

namespace monograph {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// A file of `mib` MiB on the disk, mapped and not in memory. Not in /dev/shm: memory is its disk.
class MappedTestFile {
 public:
  explicit MappedTestFile(std::size_t mib) : bytes_(mib * kMiB) {
    std::string name = std::string(getenv("TMPDIR") ? getenv("TMPDIR") : "/var/tmp") + "/XXXXXX";
    file_ = mkstemp(name.data());
    unlink(name.c_str());
    std::vector<char> part(kMiB);
    for (std::size_t i = 0; i < mib; ++i) {
      std::fill(part.begin(), part.end(), static_cast<char>(i + 1));
      EXPECT_EQ(write(file_, part.data(), part.size()), static_cast<ssize_t>(part.size()));
    }
    fsync(file_);
    posix_fadvise(file_, 0, 0, POSIX_FADV_DONTNEED);
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file_, 0);
  }
  ~MappedTestFile() {
    munmap(data_, bytes_);
    close(file_);
  }
  MappedTestFile(const MappedTestFile&) = delete;
  MappedTestFile& operator=(const MappedTestFile&) = delete;

  MappedBytes part(std::size_t from_mib, std::size_t mib) const {
    return {reinterpret_cast<std::uintptr_t>(data_) + from_mib * kMiB, mib * kMiB, file_,
            from_mib * kMiB};
  }
  MappedBytes all() const { return {reinterpret_cast<std::uintptr_t>(data_), bytes_, file_, 0}; }
  char* at(std::size_t mib) const { return static_cast<char*>(data_) + mib * kMiB; }
  int file() const { return file_; }

 private:
  std::size_t bytes_;
  int file_;
  void* data_;
};

// Bytes in the page cache, whoever read them.
std::size_t cached(const MappedBytes& range) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> there(range.bytes / page);
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  EXPECT_EQ(mincore(reinterpret_cast<void*>(range.address), range.bytes, there.data()), 0);
  std::size_t count = 0;
  for (const unsigned char entry : there) count += entry & 1;
  return count * page;
}

// The same while a thread reads and drops pages. A look is not of one moment: what is dropped
// behind it and read in front of it counts twice. So the least of some looks, if the first is too
// much.
std::size_t cached_at_once(const MappedBytes& range, std::size_t allowed) {
  std::size_t least = cached(range);
  for (int look = 0; look < 50 && least > allowed; ++look) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    least = std::min(least, cached(range));
  }
  return least;
}

std::vector<MappedTensor> layers(const MappedTestFile& file, std::size_t count, std::size_t mib) {
  std::vector<MappedTensor> tensors;
  for (std::size_t i = 0; i < count; ++i) tensors.push_back({file.part(i * mib, mib), i});
  return tensors;
}

// qemu in user mode says yes to madvise and does nothing: what this file asks for is not there.
class OnARealKernel : public testing::Test {
 protected:
  void SetUp() override {
    const MappedTestFile file(1);
    ASSERT_EQ(madvise(file.at(0), kMiB, MADV_POPULATE_READ), 0);
    if (cached(file.all()) != kMiB) GTEST_SKIP() << "madvise does nothing here: an emulator";
  }
};
using MappedPages = OnARealKernel;
using ReadAheadOfFiles = OnARealKernel;
using RegistryOfFiles = OnARealKernel;

TEST_F(MappedPages, ReadDropAndCount) {
  const MappedTestFile file(4);
  EXPECT_EQ(cached(file.all()), 0u);
  read_pages(file.part(1, 2));
  EXPECT_EQ(cached(file.part(1, 2)), 2 * kMiB);
  EXPECT_EQ(cached(file.all()), 2 * kMiB);
  drop_pages(file.all());
  EXPECT_EQ(cached(file.all()), 0u);
}

// A private copy is the only place where its bytes are.
TEST_F(MappedPages, PrivateCopiesStay) {
  const MappedTestFile file(2);
  *file.at(0) = 77;
  drop_pages(file.all());
  EXPECT_EQ(*file.at(0), 77);
  EXPECT_EQ(*file.at(1), 2);
}

// Mapped twice, as by two processes: each takes its own out, the last one frees them.
TEST_F(MappedPages, SharedPagesGoWithTheLast) {
  const MappedTestFile file(2);
  void* other = mmap(nullptr, 2 * kMiB, PROT_READ, MAP_PRIVATE, file.file(), 0);
  const MappedBytes second = {reinterpret_cast<std::uintptr_t>(other), 2 * kMiB, file.file(), 0};
  read_pages(file.all());
  read_pages(second);
  drop_pages(file.all());
  EXPECT_EQ(cached(file.all()), 2 * kMiB);
  EXPECT_EQ(held_pages(file.all()), 0u);
  EXPECT_EQ(held_pages(second), 2 * kMiB);
  drop_pages(second);
  EXPECT_EQ(cached(file.all()), 0u);
  munmap(other, 2 * kMiB);
}

// What is written to a page after it was looked at is a private copy too, and so is what is written
// while the pages go.
TEST_F(MappedPages, AWriteMeanwhileIsNotLost) {
  const MappedTestFile file(4);
  void* other = mmap(nullptr, 4 * kMiB, PROT_READ, MAP_PRIVATE, file.file(), 0);
  read_pages({reinterpret_cast<std::uintptr_t>(other), 4 * kMiB, file.file(), 0});
  read_pages(file.all());  // MADV_PAGEOUT does nothing to pages of two
  drop_pages(file.all(), [&] { *file.at(1) = 77; });
  EXPECT_EQ(*file.at(1), 77);
  EXPECT_EQ(*file.at(0), 1);
  EXPECT_EQ(*file.at(3), 4);
  munmap(other, 4 * kMiB);
}

TEST_F(MappedPages, CutFileHasAName) {
  const MappedTestFile file(2);
  ASSERT_EQ(ftruncate(file.file(), kMiB), 0);
  try {
    read_pages(file.all());
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("it was cut"), std::string::npos) << error.what();
  }
}

TEST_F(ReadAheadOfFiles, HoldsNoMoreThanAllowed) {
  const MappedTestFile file(12 * 8);
  ReadAhead ahead(layers(file, 12, 8), 48 * kMiB);
  for (int step = 0; step < 3; ++step) {
    for (std::size_t i = 0; i < 24; ++i) {
      const std::size_t unit = i < 12 ? i : 23 - i;
      ahead.use(unit);
      EXPECT_EQ(cached(file.part(unit * 8, 8)), 8 * kMiB);
      EXPECT_LE(cached_at_once(file.all(), 48 * kMiB), 48 * kMiB);
    }
  }
  const ReadAheadNumbers numbers = ahead.numbers();
  EXPECT_LE(numbers.most_held, 48 * kMiB);
  // What the first step reads, two more, and up to a turn ahead.
  EXPECT_LE(numbers.read, (96 + 48 + 2 * 96 + 48) * kMiB);
}

// Rows of a table come without a word. The most that was held says so, and room is made for them.
TEST_F(ReadAheadOfFiles, RowsOfATableAreCounted) {
  const MappedTestFile file(8 * 8 + 2);
  std::vector<MappedTensor> tensors = layers(file, 8, 8);
  tensors.push_back({file.part(64, 2), 0, Reading::kScattered});
  ReadAhead ahead(tensors, 48 * kMiB);
  std::size_t touched = 0;
  for (int step = 0; step < 4; ++step) {
    for (std::size_t row = 0; row < 16; ++row, touched += 4096)
      EXPECT_EQ(*(file.at(64) + touched), 65 + static_cast<char>(touched / kMiB));
    for (std::size_t i = 0; i < 16; ++i) ahead.use(i < 8 ? i : 15 - i);
  }
  const ReadAheadNumbers numbers = ahead.numbers();
  EXPECT_GE(numbers.most_held, 48 * kMiB);
  EXPECT_LE(numbers.most_held, 48 * kMiB + touched);
  EXPECT_LE(cached_at_once(file.all(), 48 * kMiB + touched), 48 * kMiB + touched);
}

TEST_F(ReadAheadOfFiles, WantsRoomForAUnit) {
  const MappedTestFile file(16);
  try {
    const ReadAhead ahead(layers(file, 2, 8), 16 * kMiB);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("wanted at least 41943040"), std::string::npos)
        << error.what();
  }
}

TEST_F(ReadAheadOfFiles, ChangedFilesHaveAName) {
  const MappedTestFile file(16);
  {
    ReadAhead ahead(layers(file, 2, 8), 48 * kMiB);
    ahead.use(0);
    ASSERT_EQ(ftruncate(file.file(), 10 * kMiB), 0);
    EXPECT_THROW(ahead.use(1), Error);
    EXPECT_THROW(ahead.use(0), Error);
  }
  ReadAhead ahead(layers(file, 2, 5), 48 * kMiB);
  ahead.use(0);
  ASSERT_EQ(pwrite(file.file(), "x", 1, 0), 1);
  try {
    ahead.use(1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("was written at"), std::string::npos) << error.what();
  }
}

// An error of the thread reaches the next use, and the one that waits.
TEST_F(ReadAheadOfFiles, FailureOfTheThread) {
  const MappedTestFile file(16);
  PageCalls calls;
  calls.read = [](const MappedBytes&) { throw Error("the disk is gone"); };
  ReadAhead ahead(layers(file, 2, 8), 48 * kMiB, calls);
  for (int i = 0; i < 2; ++i) {
    try {
      ahead.use(0);
      FAIL();
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "the disk is gone");
    }
  }
}

TEST_F(ReadAheadOfFiles, EndsWhileItReads) {
  const MappedTestFile file(64);
  PageCalls calls;
  calls.read = [](const MappedBytes&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  for (int i = 0; i < 10; ++i) {
    ReadAhead ahead(layers(file, 8, 8), 48 * kMiB, calls);
    ahead.use(0);
  }
}

// Two threads in different layers, and room for one of these: both get what they wait for.
TEST_F(ReadAheadOfFiles, TwoThreadsInTwoUnits) {
  const MappedTestFile file(96);
  ReadAhead ahead(layers(file, 2, 48), 80 * kMiB);
  const auto go = [&](std::size_t first) {
    for (std::size_t i = 0; i < 20; ++i) ahead.use((first + i) % 2);
  };
  std::thread other(go, 1);
  go(0);
  other.join();
  EXPECT_LE(ahead.numbers().most_held, 80 * kMiB);
}

TEST_F(ReadAheadOfFiles, StopReleasesThoseWhoWait) {
  const MappedTestFile file(64);
  PageCalls calls;
  static std::atomic<bool> reads = false;
  calls.read = [](const MappedBytes&) {
    reads = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  };
  ReadAhead ahead(layers(file, 1, 64), 96 * kMiB, calls);
  std::thread waits([&] { ahead.use(0); });
  while (!reads) std::this_thread::yield();
  ahead.stop();
  waits.join();
  EXPECT_LT(ahead.numbers().read, 64 * kMiB);
  const std::size_t read = ahead.numbers().read;
  ahead.use(0);
  EXPECT_EQ(ahead.numbers().read, read);
}

TEST_F(ReadAheadOfFiles, RefusesRangesThatAreNotInTheFile) {
  const MappedTestFile file(2);
  const auto refused = [](const MappedBytes& range) {
    try {
      const ReadAhead ahead({{range, 0}}, 64 * kMiB);
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  constexpr std::size_t kHuge = std::numeric_limits<std::size_t>::max() / 2;
  MappedBytes range = file.part(1, 2);
  EXPECT_NE(refused(range).find("has 2097152 bytes, wanted 2097152 from 1048576 on"),
            std::string::npos);
  for (const std::size_t bytes : {std::size_t{0}, kHuge}) {
    range = file.all();
    range.bytes = bytes;
    EXPECT_NE(refused(range).find("wanted"), std::string::npos) << bytes;
  }
  range = file.all();
  range.offset = kHuge;
  EXPECT_NE(refused(range).find("wanted"), std::string::npos);
  range = file.all();
  range.address = std::numeric_limits<std::uintptr_t>::max() - 1;
  EXPECT_NE(refused(range).find("wanted"), std::string::npos);
  range = file.all();
  range.file = 100000;
  EXPECT_NE(refused(range).find("file 100000 cannot be looked at"), std::string::npos);
}

// Descriptors of its own are closed again where the constructor does not come to its end.
TEST_F(ReadAheadOfFiles, AFailedStartLeavesNoDescriptor) {
  const MappedTestFile file(4), second(4);
  const auto open_files = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  std::vector<MappedTensor> tensors = layers(file, 2, 1);
  tensors.push_back({second.part(0, 1), 2});
  PageCalls calls;
  calls.drop = [](const MappedBytes&) { throw Error("no such call"); };
  const auto before = open_files();
  EXPECT_THROW(ReadAhead(tensors, 64 * kMiB, calls), Error);
  EXPECT_EQ(open_files(), before);
}

TEST_F(ReadAheadOfFiles, RefusesFilesInMemory) {
  const int file = memfd_create("base", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(file, kMiB), 0);
  try {
    const ReadAhead ahead({{{4096, kMiB, file, 0}, 0}}, 64 * kMiB);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("lies in memory (tmpfs)"), std::string::npos)
        << error.what();
  }
  close(file);
}

TEST_F(RegistryOfFiles, FindsByAddress) {
  const MappedTestFile first(16), second(16);
  note_use(first.at(0));  // nothing is open
  const std::int64_t a =
      open_read_ahead(std::make_unique<ReadAhead>(layers(first, 2, 8), 48 * kMiB));
  const std::int64_t b =
      open_read_ahead(std::make_unique<ReadAhead>(layers(second, 2, 8), 48 * kMiB));
  EXPECT_THROW(open_read_ahead(std::make_unique<ReadAhead>(layers(first, 1, 8), 48 * kMiB)), Error);
  note_use(first.at(9));
  EXPECT_EQ(cached(first.part(8, 8)), 8 * kMiB);
  EXPECT_EQ(find_read_ahead(b)->numbers().read, 0u);
  note_use(second.at(0));
  EXPECT_EQ(cached(second.part(0, 8)), 8 * kMiB);
  int elsewhere = 0;
  note_use(&elsewhere);
  close_read_ahead(a);
  close_read_ahead(a);
  EXPECT_EQ(find_read_ahead(a), nullptr);
  note_use(first.at(0));
  close_read_ahead(b);
}

TEST_F(RegistryOfFiles, ChildrenGoOnWithoutIt) {
  const MappedTestFile file(16);
  const std::int64_t number =
      open_read_ahead(std::make_unique<ReadAhead>(layers(file, 2, 8), 48 * kMiB));
  note_use(file.at(0));
  const pid_t child = fork();
  if (child == 0) {
    note_use(file.at(8));
    close_read_ahead(number);
    const std::int64_t own =
        open_read_ahead(std::make_unique<ReadAhead>(layers(file, 2, 8), 48 * kMiB));
    note_use(file.at(8));
    close_read_ahead(own);
    _exit(*file.at(8) == 9 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  note_use(file.at(8));
  close_read_ahead(number);
}

}  // namespace
}  // namespace monograph
