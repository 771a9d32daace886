// Every system call and every allocation of the writers fails once; the power fails between any
// two. Whatever happens: the old state or the complete new one, and no temporary.
#include <gtest/gtest.h>

#include <new>
#include <set>

#include "monograph/files/tests/failing_allocator.h"
#include "monograph/files/tests/faulty_file_ops.h"
#include "monograph/files/tests/temporary_folder.h"
#include "monograph/safetensors/checkpoint.h"
#include "monograph/safetensors/writer.h"

namespace monograph::safetensors {
namespace {

using namespace files;

namespace fs = std::filesystem;

const std::vector<TensorSpec> kTensors = {
    {"a", StoredDType::kF32, {3}}, {"b", StoredDType::kU8, {4}}, {"c", StoredDType::kU8, {5}}};

void write_single(const fs::path& folder, FileOps& ops) {
  WriteOptions options;
  options.ops = &ops;
  Writer writer(folder / "model.safetensors", plan_file(kTensors, {}), options);
  for (const TensorEntry& entry : writer.plan().header.tensors) {
    const std::vector<std::uint8_t> bytes(entry.size_bytes, 'n');
    writer.write(entry.name, 0, std::span(bytes).first(2));
    writer.write(entry.name, 2, std::span(bytes).subspan(2));
  }
  writer.finish();
}

void write_sharded(const fs::path& folder, FileOps& ops) {
  WriteOptions options;
  options.ops = &ops;
  const std::vector<FilePlan> plans = plan_shards(kTensors, {}, 5);
  ShardedWriter writer(folder, plans, options);
  for (const TensorSpec& spec : kTensors) {
    writer.write(spec.name, 0, std::vector<std::uint8_t>(size_bytes(spec), 'n'));
  }
  writer.finish();
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

bool holds_temporary(const fs::path& folder) {
  for (const std::string& name : names_in(folder)) {
    if (name.ends_with(".partial")) return true;
  }
  return false;
}

std::string new_single() {
  const TemporaryFolder folder;
  FaultyFileOps ops;
  write_single(folder.path(), ops);
  return read_all(folder / "model.safetensors");
}

// 3 shards and the index, every byte 'n'.
void expect_new_shards(const fs::path& folder) {
  const Checkpoint checkpoint = Checkpoint::open(folder);
  ASSERT_EQ(checkpoint.tensors().size(), kTensors.size());
  for (const LocatedTensor& tensor : checkpoint.tensors()) {
    for (const std::uint8_t byte : tensor.bytes()) ASSERT_EQ(byte, 'n');
  }
}

// Which failures the writer survives: those of calls whose result does not matter.
bool is_forgiven(Call call) {
  return call == Call::kClose || call == Call::kFlock || call == Call::kUnlink;
}

// Does the temporary that was locked still have its name? If nobody can tell, another is made.
bool is_tried_again(Call call, int at) {
  return (call == Call::kStat && at == 1) || (call == Call::kFstat && at == 0);
}

constexpr Call kAllCalls[] = {Call::kOpen,   Call::kClose,  Call::kStat,      Call::kFstat,
                              Call::kFchmod, Call::kFlock,  Call::kFallocate, Call::kPwrite,
                              Call::kFsync,  Call::kRename, Call::kUnlink};

TEST(SafetensorsFaults, EveryCallOfASingleFileFailsInTurn) {
  const std::string wanted = new_single();
  int failures = 0;
  for (const Call call : kAllCalls) {
    FaultyFileOps ops;
    for (int at = 0;; ++at) {
      SCOPED_TRACE(std::string(name_of(call)) + " " + std::to_string(at));
      const TemporaryFolder folder;
      write_all(folder / "model.safetensors", "old");
      fs::permissions(folder / "model.safetensors", fs::perms::owner_all);  // makes it call fchmod
      ops.fail(call, at, EIO);
      const std::string error = error_of([&] { write_single(folder.path(), ops); });
      if (ops.count(call) <= at) break;
      ++failures;
      const std::string content = read_all(folder / "model.safetensors");
      EXPECT_EQ(error == "no error", is_forgiven(call) || is_tried_again(call, at)) << error;
      EXPECT_TRUE(content == "old" || content == wanted);
      if (error == "no error") EXPECT_EQ(content, wanted);
      EXPECT_FALSE(holds_temporary(folder.path()));
    }
  }
  EXPECT_GE(failures, 15);
}

TEST(SafetensorsFaults, EveryCallOfShardsFailsInTurn) {
  int failures = 0;
  for (const Call call : kAllCalls) {
    FaultyFileOps ops;
    for (int at = 0;; ++at) {
      SCOPED_TRACE(std::string(name_of(call)) + " " + std::to_string(at));
      const TemporaryFolder folder;
      ops.fail(call, at, EIO);
      const std::string error = error_of([&] { write_sharded(folder.path(), ops); });
      if (ops.count(call) <= at) break;
      ++failures;
      const std::set<std::string> names = names_in(folder.path());
      if (names.contains("model.safetensors.index.json")) {
        expect_new_shards(folder.path());
      } else {
        EXPECT_TRUE(names.empty());
        EXPECT_NE(error, "no error");
      }
    }
  }
  EXPECT_GE(failures, 35);
}

TEST(SafetensorsFaults, AFullDiskIsFatalAndOtherLimitsOfFallocateAreNot) {
  for (const int code : {ENOSPC, EDQUOT, EFBIG, EIO}) {
    FaultyFileOps ops;
    const TemporaryFolder folder;
    ops.fail(Call::kFallocate, 0, code);
    EXPECT_THROW(write_single(folder.path(), ops), IoError);
    EXPECT_TRUE(names_in(folder.path()).empty());
  }
  for (const int code : {EOPNOTSUPP, ENOSYS, EINVAL, EINTR}) {
    FaultyFileOps ops;
    const TemporaryFolder folder;
    ops.fail(Call::kFallocate, 0, code);
    write_single(folder.path(), ops);
    EXPECT_EQ(read_all(folder / "model.safetensors"), new_single());
  }
}

TEST(SafetensorsFaults, ADiskThatFillsWhileWritingAndInterruptedWrites) {
  FaultyFileOps ops;
  const TemporaryFolder folder;
  ops.fail(Call::kPwrite, 3, ENOSPC);
  try {
    write_single(folder.path(), ops);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_EQ(error.code(), ENOSPC);
  }
  EXPECT_TRUE(names_in(folder.path()).empty());
  ops.fail(Call::kPwrite, 3, EINTR);
  write_single(folder.path(), ops);
  EXPECT_EQ(read_all(folder / "model.safetensors"), new_single());
}

TEST(SafetensorsFaults, AFileWithAFailedWriteCanNotBeFinished) {
  FaultyFileOps ops;
  const TemporaryFolder folder;
  WriteOptions options;
  options.ops = &ops;
  Writer writer(folder / "m.safetensors", plan_file({{"a", StoredDType::kU8, {4}}}, {}), options);
  ops.fail(Call::kPwrite, 0, EIO);
  EXPECT_THROW(writer.write("a", 0, std::vector<std::uint8_t>(4)), IoError);
  EXPECT_NE(error_of([&] { writer.finish(); }).find("an earlier write failed"), std::string::npos);
}

TEST(SafetensorsFaults, FolderSyncMayBeUnsupported) {
  FaultyFileOps ops;
  const TemporaryFolder folder;
  ops.fail(Call::kFsync, 1, EINVAL);  // the first is that of the file
  write_single(folder.path(), ops);
  EXPECT_EQ(read_all(folder / "model.safetensors"), new_single());
}

TEST(SafetensorsFaults, EveryAllocationFailsInTurn) {
  const std::string wanted = new_single();
  FaultyFileOps ops;
  long at = 0;
  for (bool done = false; !done; ++at) {
    const TemporaryFolder folder, shards;
    write_all(folder / "model.safetensors", "old");
    for (const bool single : {true, false}) {
      try {
        allocations_left = at;
        if (single) {
          write_single(folder.path(), ops);
        } else {
          write_sharded(shards.path(), ops);
        }
        done = !single && allocations_left >= 0;
        allocations_left = -1;
      } catch (const std::bad_alloc&) {
        allocations_left = -1;
      }
    }
    const std::string content = read_all(folder / "model.safetensors");
    EXPECT_TRUE(content == "old" || content == wanted) << at;
    EXPECT_EQ(names_in(folder.path()).size(), 1u) << at;
    if (names_in(shards.path()).contains("model.safetensors.index.json")) {
      expect_new_shards(shards.path());
    } else {
      EXPECT_TRUE(names_in(shards.path()).empty()) << at;
    }
    ASSERT_LT(at, 10000);
  }
  EXPECT_GT(at, 100);
}

TEST(SafetensorsFaults, ThePowerFailsBetweenAnyTwoCalls) {
  const std::string wanted = new_single();
  for (const Renames renames : {Renames::kEager, Renames::kLazy}) {
    for (int calls = 0;; ++calls) {
      SCOPED_TRACE(calls);
      const TemporaryFolder folder;
      write_all(folder / "model.safetensors", "old");
      PowerFailureOps ops(calls, renames);
      const std::string error = error_of([&] { write_single(folder.path(), ops); });
      const std::string content = read_all(folder / "model.safetensors");
      if (error == "no error") EXPECT_EQ(content, wanted);
      EXPECT_TRUE(content == "old" || content == wanted);
      // The next run finds the leftovers of the dead one.
      FaultyFileOps good;
      write_single(folder.path(), good);
      EXPECT_EQ(names_in(folder.path()), std::set<std::string>{"model.safetensors"});
      if (!ops.failed()) {
        EXPECT_GE(calls, 10);
        break;
      }
    }
  }
}

TEST(SafetensorsFaults, ThePowerFailsBetweenAnyTwoCallsOfShards) {
  for (const Renames renames : {Renames::kEager, Renames::kLazy}) {
    for (int calls = 0;; ++calls) {
      SCOPED_TRACE(calls);
      const TemporaryFolder folder;
      PowerFailureOps ops(calls, renames);
      const std::string error = error_of([&] { write_sharded(folder.path(), ops); });
      if (names_in(folder.path()).contains("model.safetensors.index.json")) {
        expect_new_shards(folder.path());
      } else {
        EXPECT_NE(error, "no error");
        FaultyFileOps good;
        write_sharded(folder.path(), good);
        expect_new_shards(folder.path());
      }
      if (error == "no error" && !ops.failed()) {
        EXPECT_GE(calls, 20);
        break;
      }
    }
  }
}

}  // namespace
}  // namespace monograph::safetensors
