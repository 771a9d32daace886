// Two processes write one file at once, each stopped before each of its calls while the other runs.
#include <gtest/gtest.h>

#include <fstream>

#include "monograph/files/atomic_file.h"
#include "monograph/files/mapped_file.h"
#include "monograph/files/tests/pausing_file_ops.h"
#include "monograph/files/tests/temporary_folder.h"

namespace monograph::files {
namespace {

constexpr std::size_t kHalf = 3000;

bool write(const std::filesystem::path& target, char letter, FileOps& ops) {
  const std::vector<std::uint8_t> half(kHalf, static_cast<std::uint8_t>(letter));
  AtomicFile file(target, {}, ops);
  file.write_at(0, half);
  file.write_at(kHalf, half);
  file.sync();
  file.rename_into_place();
  file.sync_folder();
  return true;
}

std::string whole(char letter) { return std::string(2 * kHalf, letter); }

class TwoFileWriters : public testing::TestWithParam<bool> {};

// The parameter: whether a killed process left a temporary.
TEST_P(TwoFileWriters, TheFileIsWholeWhereverTheyMeet) {
  const TemporaryFolder folder;
  const auto target = folder / "m.safetensors", temporary = folder / ".m.safetensors.partial";
  int both = 0, one = 0;
  const int rounds = pause_at_each_call(
      [&](FileOps& ops) { return write(target, 'a', ops); },
      [&](FileOps& ops) { return write(target, 'b', ops); },
      [&] {
        write_all(target, "old");
        if (GetParam()) write_all(temporary, "half");
      },
      [&](const PausedProcess& a, const PausedProcess& b, const std::string& where) {
        SCOPED_TRACE(where);
        EXPECT_TRUE(a.wrote() || a.refused());
        EXPECT_TRUE(b.wrote() || b.refused());
        const std::string found = read_all(target);
        EXPECT_TRUE((a.wrote() && found == whole('a')) || (b.wrote() && found == whole('b')) ||
                    (!a.wrote() && !b.wrote() && found == "old"))
            << found.size() << " bytes, a " << a.wrote() << ", b " << b.wrote();
        EXPECT_TRUE(a.wrote() || b.wrote());
        EXPECT_FALSE(std::filesystem::exists(temporary));
        both += a.wrote() && b.wrote();
        one += a.wrote() != b.wrote();
      });
  EXPECT_GT(rounds, 300);
  EXPECT_GT(both, 0);  // one after the other
  EXPECT_GT(one, 0);   // at once: one is refused
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutRemains, TwoFileWriters, testing::Bool());

TEST(ResolvedPath, ALinkThatTurnsWhileAFileIsWrittenLeadsNowhereElse) {
  const TemporaryFolder folder;
  for (const char* name : {"one", "two"}) std::filesystem::create_directory(folder / name);
  const auto turn = [&](const char* to) {
    std::filesystem::remove(folder / "link");
    std::filesystem::create_directory_symlink(to, folder / "link");
  };
  for (int at = 0;; ++at) {
    turn("one");
    PausedProcess writer(at, [&](FileOps& ops) { return write(folder / "link/m.bin", 'a', ops); });
    if (!writer.stopped()) break;
    turn("two");
    writer.finish();
    EXPECT_TRUE(writer.wrote());
    EXPECT_EQ(read_all(folder / "one/m.bin"), whole('a')) << at;
    EXPECT_TRUE(std::filesystem::is_empty(folder / "two")) << at;
    std::filesystem::remove(folder / "one/m.bin");
  }
}

TEST(ResolvedPath, ALinkInThePlaceOfACheckedFileIsRefused) {
  const TemporaryFolder folder;
  write_all(folder / "real", "content");
  std::filesystem::create_symlink("real", folder / "link");
  EXPECT_EQ(MappedFile(folder / "link").text(), "content");
  EXPECT_THROW(MappedFile(folder / "link", "shown"), IoError);
}

}  // namespace
}  // namespace monograph::files
