// Reading files: mapping, indexes, folders, links.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "monograph/files/tests/temporary_folder.h"
#include "monograph/safetensors/checkpoint.h"
#include "monograph/safetensors/index.h"
#include "monograph/safetensors/tests/hostile_files.h"

namespace monograph::safetensors {
namespace {

using namespace files;

namespace fs = std::filesystem;

// One tensor of two bytes, "ab".
std::string one_tensor(const std::string& name) {
  return file_bytes("{\"" + name + R"(":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 0) +
         "ab";
}

constexpr const char* kTwoShards =
    R"({"metadata":{"total_size":4,"other":[1.5,{"a":null}]},"more":[true,false,"x",-1e+5],
        "weight_map":{"y":"b.safetensors","x":"a.safetensors"}})";

void make_two_shards(const fs::path& folder) {
  fs::create_directories(folder);
  write_all(folder / "model.safetensors.index.json", kTwoShards);
  write_all(folder / "a.safetensors", one_tensor("x"));
  write_all(folder / "b.safetensors", one_tensor("y"));
}

class HostileIndex : public testing::TestWithParam<HostileCase> {};

TEST_P(HostileIndex, IsRefusedByItsRule) {
  const HostileCase& hostile = GetParam();
  const TemporaryFolder folder;
  make_case(hostile, folder.path());
  const std::string error = error_of([&] { Checkpoint::open(folder / hostile.open); });
  EXPECT_NE(error.find(hostile.rule), std::string::npos) << error;
  EXPECT_TRUE(error.starts_with(folder.path().string())) << error;
  for (const char c : error) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << error;
}

INSTANTIATE_TEST_SUITE_P(Safetensors, HostileIndex, testing::ValuesIn(hostile_indexes()),
                         [](const auto& hostile) { return hostile.param.name; });

TEST(SafetensorsReader, GivesTheBytesOfTheFile) {
  const TemporaryFolder folder;
  write_all(folder / "m.safetensors", one_tensor("x"));
  Reader reader(folder / "m.safetensors");
  const Reader moved = std::move(reader);
  const std::span<const std::uint8_t> bytes = moved.bytes(*moved.find("x"));
  EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "ab");
  struct stat status {};
  ASSERT_EQ(::stat((folder / "m.safetensors").c_str(), &status), 0);
  EXPECT_EQ(moved.id(), id_of(status));
}

TEST(SafetensorsReader, TellsAMissingFileFromABadOne) {
  const TemporaryFolder folder;
  try {
    Reader reader(folder / "missing.safetensors");
    FAIL();
  } catch (const IoError& error) {
    EXPECT_EQ(error.code(), ENOENT);
  }
  EXPECT_THROW(Reader(folder.path()), Error);
}

TEST(SafetensorsReader, RefusesALinkInThePlaceOfACheckedFile) {
  const TemporaryFolder folder;
  write_all(folder / "real", "content");
  std::filesystem::create_symlink("real", folder / "link");
  EXPECT_THROW(Reader(folder / "link", "shown"), IoError);
}

TEST(SafetensorsReader, DoesNotWaitForAPipe) {
  const TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe.safetensors").c_str(), 0600), 0);
  const std::string error = error_of([&] { Reader reader(folder / "pipe.safetensors"); });
  EXPECT_NE(error.find("not a regular file"), std::string::npos) << error;
}

TEST(SafetensorsCheckpoint, OpensFileFolderAndIndex) {
  const TemporaryFolder folder;
  make_two_shards(folder / "sharded");
  write_all(folder / "adapter_model.safetensors", one_tensor("x"));
  for (const fs::path& path :
       {folder / "sharded", folder / "sharded/model.safetensors.index.json"}) {
    const Checkpoint checkpoint = Checkpoint::open(path);
    ASSERT_EQ(checkpoint.tensors().size(), 2u);
    EXPECT_EQ(checkpoint.tensors()[0].entry->name, "x");
    EXPECT_EQ(checkpoint.find("y")->file->path().filename(), "b.safetensors");
    EXPECT_EQ(checkpoint.find("y")->bytes()[1], 'b');
    EXPECT_EQ(checkpoint.find("z"), nullptr);
    EXPECT_EQ(checkpoint.ids().size(), 2u);
  }
  EXPECT_EQ(Checkpoint::open(folder.path(), "adapter_model").tensors().size(), 1u);
  EXPECT_EQ(Checkpoint::open(folder / "adapter_model.safetensors").files().size(), 1u);
  EXPECT_THROW(Checkpoint::open(folder.path()), IoError);
}

TEST(SafetensorsCheckpoint, RefusesAFolderWithBothForms) {
  const TemporaryFolder folder;
  make_two_shards(folder.path());
  write_all(folder / "model.safetensors", one_tensor("x"));
  EXPECT_NE(error_of([&] { Checkpoint::open(folder.path()); }).find("holds both"),
            std::string::npos);
}

TEST(SafetensorsCheckpoint, FollowsLinksInsideTheFolderAndIntoAHubCache) {
  const TemporaryFolder folder;
  make_two_shards(folder / "plain");
  fs::rename(folder / "plain/a.safetensors", folder / "plain/real");
  fs::create_symlink("real", folder / "plain/a.safetensors");
  EXPECT_EQ(Checkpoint::open(folder / "plain").tensors().size(), 2u);

  const fs::path repository = folder / "models--org--name";
  make_two_shards(repository / "blobs");
  fs::create_directories(repository / "snapshots/0123");
  for (const char* name : {"model.safetensors.index.json", "a.safetensors", "b.safetensors"}) {
    fs::create_symlink(fs::path("../../blobs") / name, repository / "snapshots/0123" / name);
  }
  EXPECT_EQ(Checkpoint::open(repository / "snapshots/0123").tensors().size(), 2u);
}

TEST(SafetensorsCheckpoint, OpensShardsInSubfoldersAndThroughARelativePath) {
  const TemporaryFolder folder;
  fs::create_directories(folder / "sub");
  write_all(folder / "m.index.json", R"({"weight_map":{"x":"sub/a.safetensors"}})");
  write_all(folder / "sub/a.safetensors", one_tensor("x"));
  const fs::path before = fs::current_path();
  fs::current_path(folder.path());
  EXPECT_EQ(Checkpoint::open("m.index.json").tensors().size(), 1u);
  fs::current_path(before);
}

TEST(SafetensorsIndex, ReadsTotalSizeOnlyIfItIsAWholeNumber) {
  const auto total = [](const std::string& value) {
    return parse_index(
               R"({"metadata":{"total_size":)" + value + R"(},"weight_map":{"x":"a.safetensors"}})",
               "test")
        .total_size_bytes;
  };
  EXPECT_EQ(total("12"), 12u);
  EXPECT_EQ(total("12.0"), std::nullopt);
  EXPECT_EQ(total("99999999999999999999"), std::nullopt);
  EXPECT_EQ(total("\"12\""), std::nullopt);
  EXPECT_EQ(total("null"), std::nullopt);
  EXPECT_EQ(total("-1"), std::nullopt);
  EXPECT_EQ(parse_index(kTwoShards, "test").total_size_bytes, 4u);
}

TEST(SafetensorsIndex, SortsShardsAndTensors) {
  const Index index = parse_index(kTwoShards, "test");
  EXPECT_EQ(index.shards, (std::vector<std::string>{"a.safetensors", "b.safetensors"}));
  EXPECT_EQ(index.find("y")->shard, 1u);
  EXPECT_EQ(index.find("z"), nullptr);
}

TEST(SafetensorsIndex, RefusesMoreThan100Megabytes) {
  EXPECT_THROW(parse_index(std::string(kMaxIndexBytes + 1, ' '), "test"), Error);
}

}  // namespace
}  // namespace monograph::safetensors
