// Planning and writing: the bytes, their determinism, the life of the temporary file.
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

#include "monograph/files/tests/faulty_file_ops.h"
#include "monograph/files/tests/temporary_folder.h"
#include "monograph/safetensors/checkpoint.h"
#include "monograph/safetensors/writer.h"

namespace monograph::safetensors {
namespace {

using namespace files;

namespace fs = std::filesystem;

std::vector<std::uint8_t> pattern(std::size_t size, unsigned seed) {
  std::vector<std::uint8_t> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(i * 31 + seed);
  return bytes;
}

// The bytes that tests write for a tensor, from its name.
std::vector<std::uint8_t> content_of(const TensorEntry& entry) {
  return pattern(entry.size_bytes, static_cast<unsigned>(entry.name.size() * 7 + entry.name[0]));
}

std::vector<TensorSpec> some_tensors() {
  return {{"b", StoredDType::kU8, {3}},          {"a", StoredDType::kF32, {2, 2}},
          {"c", StoredDType::kBF16, {5}},        {"scalar", StoredDType::kF64, {}},
          {"none", StoredDType::kI64, {0, 7}},   {"codes", StoredDType::kF4, {2, 3}},
          {"six", StoredDType::kF6E3M2, {4, 1}}, {"flag", StoredDType::kBool, {1}}};
}

template <class AnyWriter>
void write_whole(AnyWriter& writer, const Header& header) {
  for (const TensorEntry& entry : header.tensors) writer.write(entry.name, 0, content_of(entry));
}

void write_file_of(const fs::path& path, const WriteOptions& options = {}) {
  Writer writer(path, plan_file(some_tensors(), {{"format", "pt"}}), options);
  write_whole(writer, writer.plan().header);
  writer.finish();
}

std::size_t files_in(const fs::path& folder) {
  return static_cast<std::size_t>(
      std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

TEST(SafetensorsPlan, GivesTheBytesOfTheRustWriter) {
  // Printed by safetensors 0.8.0 (safetensors.torch.save) for the same tensors.
  const std::string wanted =
      R"({"__metadata__":{"format":"pt"},"empty":{"dtype":"I64","shape":[0,4],"data_offsets":[0,0]},)"
      R"("wide":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
      R"("d":{"dtype":"F64","shape":[1],"data_offsets":[8,16]},)"
      R"("c":{"dtype":"C64","shape":[1],"data_offsets":[16,24]},)"
      R"("a.scale":{"dtype":"F32","shape":[2],"data_offsets":[24,32]},)"
      "\"b\\\"\\\\\\n\\u0001\x7f\xc3\xa9/\":"
      R"({"dtype":"BF16","shape":[1,2],"data_offsets":[32,36]},)"
      R"("f8":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[36,38]},)"
      R"("a.weight":{"dtype":"U8","shape":[2,1],"data_offsets":[38,40]},)"
      R"("z.weight":{"dtype":"U8","shape":[3],"data_offsets":[40,43]},)"
      R"("flag":{"dtype":"BOOL","shape":[],"data_offsets":[43,44]}}       )";
  const FilePlan plan = plan_file({{"z.weight", StoredDType::kU8, {3}},
                                   {"a.scale", StoredDType::kF32, {2}},
                                   {"b\"\\\n\x01\x7f\xc3\xa9/", StoredDType::kBF16, {1, 2}},
                                   {"a.weight", StoredDType::kU8, {2, 1}},
                                   {"empty", StoredDType::kI64, {0, 4}},
                                   {"flag", StoredDType::kBool, {}},
                                   {"wide", StoredDType::kI64, {1}},
                                   {"f8", StoredDType::kF8E4M3, {2}},
                                   {"d", StoredDType::kF64, {1}},
                                   {"c", StoredDType::kC64, {1}}},
                                  {{"format", "pt"}});
  EXPECT_EQ(plan.prefix.substr(8), wanted);
  EXPECT_EQ(plan.prefix.substr(0, 8), std::string("\x80\x02\0\0\0\0\0\0", 8));
  EXPECT_EQ(plan.size_bytes, 8u + 640 + 44);
}

TEST(SafetensorsPlan, RefusesWhatTheReaderWouldRefuse) {
  const auto error = [](std::vector<TensorSpec> tensors, const Metadata& metadata = {}) {
    return error_of([&] { plan_file(std::move(tensors), metadata); });
  };
  EXPECT_NE(error({{"a", StoredDType::kU8, {1}}, {"a", StoredDType::kU8, {1}}}).find("twice"),
            std::string::npos);
  EXPECT_NE(error({{"__metadata__", StoredDType::kU8, {1}}}).find("reserved"), std::string::npos);
  EXPECT_NE(error({{"\xff", StoredDType::kU8, {1}}}).find("not UTF-8"), std::string::npos);
  EXPECT_NE(error({}, {{"k", "\xc0\x80"}}).find("not UTF-8"), std::string::npos);
  EXPECT_NE(error({{"a", StoredDType::kF4, {3}}}).find("whole number of bytes"), std::string::npos);
  EXPECT_NE(error({{"a", StoredDType::kU8, {1ull << 32, 1ull << 32}}}).find("overflows"),
            std::string::npos);
  std::vector<TensorSpec> large;
  for (const char* name : {"a", "b", "c", "d", "e"}) {
    large.push_back({name, StoredDType::kU8, {(1ull << 61) - 1}});
  }
  EXPECT_NE(error(large).find("2^63"), std::string::npos);
  EXPECT_NE(error({}, {{"k", std::string(kMaxHeaderBytes, 'x')}}).find("are allowed"),
            std::string::npos);
}

TEST(SafetensorsPlan, FillsShardsInOrder) {
  std::vector<TensorSpec> tensors;
  for (const std::uint64_t size : {4, 4, 9, 1, 7, 1}) {
    tensors.push_back(
        {std::string("t").append(std::to_string(tensors.size())), StoredDType::kU8, {size}});
  }
  const std::vector<FilePlan> plans = plan_shards(tensors, {}, 8);
  std::vector<std::size_t> counts;
  for (const FilePlan& plan : plans) counts.push_back(plan.header.tensors.size());
  EXPECT_EQ(counts, (std::vector<std::size_t>{2, 1, 2, 1}));
  EXPECT_EQ(plans[1].file_name, "model-00002-of-00004.safetensors");
  EXPECT_EQ(plan_shards(tensors, {}, 100)[0].file_name, "model.safetensors");
  EXPECT_EQ(plan_shards({}, {}, 100).size(), 1u);
}

TEST(SafetensorsWriter, RoundTripsEveryTensor) {
  const TemporaryFolder folder;
  write_file_of(folder / "m.safetensors");
  const Reader reader(folder / "m.safetensors");
  EXPECT_EQ(reader.header().tensors.size(), some_tensors().size());
  EXPECT_EQ(reader.header().metadata.at("format"), "pt");
  EXPECT_EQ(reader.header().data_offset_bytes % 8, 0u);
  for (const TensorEntry& entry : reader.header().tensors) {
    const auto bytes = reader.bytes(entry);
    EXPECT_EQ(std::vector<std::uint8_t>(bytes.begin(), bytes.end()), content_of(entry));
    EXPECT_EQ(entry.offset_bytes * 8 % std::max(8u, bits_of(entry.dtype)), 0u) << entry.name;
  }
  EXPECT_EQ(files_in(folder.path()), 1u);
}

TEST(SafetensorsWriter, RandomCheckpointsRoundTrip) {
  std::mt19937 random(20261115);
  for (int round = 0; round < 50; ++round) {
    SCOPED_TRACE(round);
    std::vector<TensorSpec> tensors;
    const std::uint64_t count = random() % 12;
    for (std::uint64_t i = 0; i < count; ++i) {
      TensorSpec spec{
          std::string("t").append(std::to_string(i)), static_cast<StoredDType>(random() % 22), {}};
      for (std::uint64_t d = random() % 5; d > 0; --d) spec.shape.push_back(random() % 4);
      spec.shape.push_back(4);  // whole bytes for 4 and 6 bits
      tensors.push_back(spec);
    }
    const TemporaryFolder folder;
    std::vector<FilePlan> plans = plan_shards(tensors, {{"round", std::to_string(round)}}, 64);
    FaultyFileOps ops;
    WriteOptions options;
    options.ops = &ops;
    ShardedWriter writer(folder.path(), plans, options);
    for (const FilePlan& plan : plans) write_whole(writer, plan.header);
    writer.finish();
    const Checkpoint checkpoint = Checkpoint::open(folder.path());
    ASSERT_EQ(checkpoint.tensors().size(), tensors.size());
    for (const TensorSpec& spec : tensors) {
      const LocatedTensor* found = checkpoint.find(spec.name);
      ASSERT_NE(found, nullptr);
      EXPECT_EQ(found->entry->shape, spec.shape);
      EXPECT_EQ(found->entry->dtype, spec.dtype);
      EXPECT_TRUE(std::ranges::equal(found->bytes(), content_of(*found->entry)));
    }
  }
}

TEST(SafetensorsWriter, BytesDoNotDependOnOrderPiecesOrThreads) {
  const TemporaryFolder folder;
  write_file_of(folder / "one.safetensors");
  std::vector<TensorSpec> reversed = some_tensors();
  std::reverse(reversed.begin(), reversed.end());
  FaultyFileOps ops;
  ops.shorten_writes(3);
  WriteOptions options;
  options.ops = &ops;
  Writer writer(folder / "two.safetensors", plan_file(reversed, {{"format", "pt"}}), options);
  // Byte i of every tensor is written by thread i % 3, last bytes first.
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&writer, t] {
      for (const TensorEntry& entry : writer.plan().header.tensors) {
        const std::vector<std::uint8_t> content = content_of(entry);
        for (std::uint64_t i = entry.size_bytes; i-- > 0;) {
          if (i % 3 == t) writer.write(entry.name, i, {&content[i], 1});
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  writer.finish();
  EXPECT_EQ(read_all(folder / "one.safetensors"), read_all(folder / "two.safetensors"));
}

TEST(SafetensorsWriter, RefusesMissingDoubleAndForeignBytes) {
  const TemporaryFolder folder;
  const fs::path path = folder / "m.safetensors";
  write_all(path, "old");
  {
    Writer writer(path,
                  plan_file({{"a", StoredDType::kU8, {8}}, {"b", StoredDType::kU8, {1}}}, {}));
    const std::vector<std::uint8_t> bytes = pattern(8, 0);
    writer.write("a", 2, std::span(bytes).first(3));
    for (const auto& [begin, size] : {std::pair{2, 3}, {0, 3}, {4, 1}, {4, 4}, {0, 8}, {3, 1}}) {
      EXPECT_THROW(writer.write("a", static_cast<std::uint64_t>(begin),
                                std::span(bytes).first(static_cast<std::size_t>(size))),
                   Error);
    }
    EXPECT_THROW(writer.write("a", 5, std::span(bytes).first(4)), Error);
    EXPECT_THROW(writer.write("a", UINT64_MAX, std::span(bytes).first(1)), Error);
    EXPECT_THROW(writer.write("z", 0, bytes), Error);
    EXPECT_THROW(writer.finish(), Error);
  }
  Writer incomplete(path, plan_file({{"a", StoredDType::kU8, {8}}}, {}));
  incomplete.write("a", 0, std::vector<std::uint8_t>(7));
  EXPECT_NE(error_of([&] { incomplete.finish(); }).find("tensor 'a': not all bytes"),
            std::string::npos);
  EXPECT_EQ(read_all(path), "old");
}

TEST(SafetensorsWriter, LeavesNothingBehindIfItIsNotFinished) {
  const TemporaryFolder folder;
  { Writer writer(folder / "m.safetensors", plan_file(some_tensors(), {})); }
  EXPECT_EQ(files_in(folder.path()), 0u);
}

TEST(SafetensorsWriter, KeepsTheModeOfAnExistingTargetElseTheUmask) {
  const TemporaryFolder folder;
  const fs::path path = folder / "m.safetensors";
  const auto mode = [&path] {
    struct stat status {};
    ::stat(path.c_str(), &status);
    return status.st_mode & 07777;
  };
  const mode_t before = ::umask(027);
  write_file_of(path);
  EXPECT_EQ(mode(), 0640u);
  for (const mode_t kept : {0600u, 0664u, 0755u, 0444u}) {
    ASSERT_EQ(::chmod(path.c_str(), kept), 0);
    write_file_of(path);
    EXPECT_EQ(mode(), kept);
  }
  ::umask(before);
}

TEST(SafetensorsWriter, RefusesToReplaceItsOwnInputUnderAnyName) {
  const TemporaryFolder folder;
  write_file_of(folder / "in.safetensors");
  fs::create_hard_link(folder / "in.safetensors", folder / "hard.safetensors");
  fs::create_symlink("in.safetensors", folder / "soft.safetensors");
  const Checkpoint input = Checkpoint::open(folder / "in.safetensors");
  const std::string before = read_all(folder / "in.safetensors");
  WriteOptions options;
  options.inputs = input.ids();
  for (const char* name : {"in.safetensors", "hard.safetensors", "soft.safetensors"}) {
    EXPECT_NE(error_of([&] { write_file_of(folder / name, options); }).find("made from"),
              std::string::npos);
  }
  write_file_of(folder / "other.safetensors", options);
  EXPECT_EQ(read_all(folder / "in.safetensors"), before);
}

TEST(SafetensorsWriter, ReplacesALinkAndNotWhatItPointsTo) {
  const TemporaryFolder folder;
  write_all(folder / "blob", "old");
  fs::create_symlink("blob", folder / "m.safetensors");
  write_file_of(folder / "m.safetensors");
  EXPECT_EQ(read_all(folder / "blob"), "old");
  EXPECT_FALSE(fs::is_symlink(folder / "m.safetensors"));
  fs::create_directory(folder / "d.safetensors");
  EXPECT_THROW(write_file_of(folder / "d.safetensors"), Error);
  EXPECT_THROW(write_file_of(folder / "missing" / "m.safetensors"), IoError);
}

TEST(SafetensorsWriter, RemovesATemporaryOfADeadProcessButNotOfALivingOne) {
  const TemporaryFolder folder;
  write_all(folder / ".m.safetensors.partial", std::string(5000, 'x'));
  write_file_of(folder / "m.safetensors");
  EXPECT_EQ(files_in(folder.path()), 1u);

  Writer living(folder / "m.safetensors", plan_file(some_tensors(), {}));
  EXPECT_NE(error_of([&] { write_file_of(folder / "m.safetensors"); }).find("another process"),
            std::string::npos);
  write_whole(living, living.plan().header);
  living.finish();
  EXPECT_EQ(Checkpoint::open(folder / "m.safetensors").tensors().size(), some_tensors().size());
}

TEST(SafetensorsShards, RefuseAFolderThatHoldsACheckpointButNotLeftovers) {
  const TemporaryFolder folder;
  const std::vector<FilePlan> plans = plan_shards(some_tensors(), {}, 8);
  ASSERT_GT(plans.size(), 2u);
  const auto write = [&] {
    ShardedWriter writer(folder.path(), plans);
    for (const FilePlan& plan : plans) write_whole(writer, plan.header);
    writer.finish();
  };
  write_all(folder / plans[0].file_name, "left by a killed run");
  write();
  EXPECT_EQ(Checkpoint::open(folder.path()).tensors().size(), some_tensors().size());
  EXPECT_EQ(files_in(folder.path()), plans.size() + 1);
  EXPECT_NE(error_of(write).find("already there"), std::string::npos);
  fs::remove(folder / "model.safetensors.index.json");
  write_all(folder / "model.safetensors", "single");
  EXPECT_NE(error_of(write).find("already there"), std::string::npos);
}

TEST(SafetensorsShards, IndexIsThatOfTransformers) {
  const std::vector<FilePlan> plans =
      plan_shards({{"b", StoredDType::kU8, {2}}, {"a\"", StoredDType::kU8, {3}}}, {}, 3);
  EXPECT_EQ(index_text(plans), R"({
  "metadata": {
    "total_size": 5
  },
  "weight_map": {
    "a\"": "model-00002-of-00002.safetensors",
    "b": "model-00001-of-00002.safetensors"
  }
}
)");
}

}  // namespace
}  // namespace monograph::safetensors
