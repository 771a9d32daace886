// A staged folder: the old state or the complete new one, whatever fails, and nothing beside it
// after the next run.
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <set>

#include "monograph/convert/copy_sidecars.h"
#include "monograph/files/atomic_file.h"
#include "monograph/files/staged_folder.h"
#include "monograph/files/tests/failing_allocator.h"
#include "monograph/files/tests/faulty_file_ops.h"
#include "monograph/files/tests/temporary_folder.h"
#include "monograph/safetensors/writer.h"

namespace monograph {
namespace {

namespace fs = std::filesystem;
using namespace files;
using namespace safetensors;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    names.insert(fs::relative(entry.path(), folder).string());
  }
  return names;
}

// A model in three shards, one file carried over, a config.
void write_model(const fs::path& source, const fs::path& target, Existing existing, FileOps& ops) {
  const fs::path inputs[] = {source};
  StagedFolder folder(target, existing, inputs, ops);
  WriteOptions options;
  options.ops = &ops;
  ShardedWriter writer(
      folder.path(),
      plan_shards({{"a", StoredDType::kU8, {4}}, {"b", StoredDType::kU8, {4}}}, {}, 4), options);
  for (const char* name : {"a", "b"}) writer.write(name, 0, std::vector<std::uint8_t>(4, 'n'));
  writer.finish();
  copy_sidecars(source, folder.path(), Sidecars::kAll, ops);
  write_file(folder.path() / "config.json", "new", ops);
  folder.commit();
}

const std::set<std::string> kNewModel = {
    "additional_chat_templates",
    "additional_chat_templates/rag.jinja",
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
};

void make_source(const fs::path& source) {
  fs::create_directories(source / "additional_chat_templates");
  write_all(source / "tokenizer.json", "words");
  write_all(source / "additional_chat_templates/rag.jinja", "{{ x }}");
  for (const char* name : {"model.safetensors", "config.json", "README.md", "adapter_config.json",
                           "pytorch_model.bin", "model.safetensors.index.json", ".gitattributes"}) {
    write_all(source / name, "left behind");
  }
}

void make_old(const fs::path& target) {
  fs::create_directories(target);
  write_all(target / "config.json", "old");
  write_all(target / "model.safetensors", "old");
}

// 'o' for the old state, 'n' for the complete new one, 0 for neither.
char state_of(const fs::path& target, bool had_old) {
  if (!fs::exists(target)) return had_old ? 0 : 'o';
  const std::set<std::string> names = names_in(target);
  if (names == kNewModel && read_all(target / "config.json") == "new" &&
      read_all(target / "tokenizer.json") == "words") {
    return 'n';
  }
  const bool old = names == std::set<std::string>{"config.json", "model.safetensors"} &&
                   read_all(target / "config.json") == "old";
  return old && had_old ? 'o' : 0;
}

// A rerun completes, and nothing but source and target is left.
void expect_clean_rerun(const TemporaryFolder& folder) {
  FaultyFileOps good;
  write_model(folder / "source", folder / "out", Existing::kReplace, good);
  EXPECT_EQ(state_of(folder / "out", true), 'n');
  std::set<std::string> top;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    top.insert(entry.path().filename());
  }
  EXPECT_EQ(top, (std::set<std::string>{"out", "source"}));
}

TEST(StagedFolder, AppearsCompleteOverNothingAndOverAnEmptyFolder) {
  for (const bool empty : {false, true}) {
    const TemporaryFolder folder;
    make_source(folder / "source");
    if (empty) fs::create_directory(folder / "out");
    FaultyFileOps ops;
    write_model(folder / "source", folder / "out/", Existing::kRefuse, ops);
    EXPECT_EQ(state_of(folder / "out", false), 'n');
    expect_clean_rerun(folder);
  }
}

TEST(StagedFolder, RefusesWhatItMustNotReplace) {
  const TemporaryFolder folder;
  make_source(folder / "source");
  FaultyFileOps ops;
  const auto error = [&](const char* target, Existing existing) {
    return error_of([&] { write_model(folder / "source", folder / target, existing, ops); });
  };
  make_old(folder / "old");
  EXPECT_NE(error("old", Existing::kRefuse).find("exists; choose another name"), std::string::npos);
  write_all(folder / "file", "x");
  EXPECT_NE(error("file", Existing::kReplace).find("not a folder"), std::string::npos);
  fs::create_directory(folder / "photos");
  write_all(folder / "photos/one.jpg", "x");
  EXPECT_NE(error("photos", Existing::kReplace).find("is not replaced"), std::string::npos);
  EXPECT_NE(error("source", Existing::kReplace).find("overlaps"), std::string::npos);
  EXPECT_NE(error("source/out", Existing::kReplace).find("overlaps"), std::string::npos);
  EXPECT_NE(error("source/..", Existing::kReplace).find("overlaps"), std::string::npos);
  fs::create_directory_symlink(folder / "old", folder / "link");
  EXPECT_NE(error("link", Existing::kReplace).find("not a folder"), std::string::npos);
  // A folder in the way that is somebody else's.
  fs::create_directory(folder / ".out.partial");
  write_all(folder / ".out.partial/mine", "x");
  EXPECT_NE(error("out", Existing::kReplace).find("not made by this program"), std::string::npos);
  EXPECT_EQ(read_all(folder / ".out.partial/mine"), "x");
  EXPECT_EQ(state_of(folder / "old", true), 'o');
  EXPECT_EQ(read_all(folder / "photos/one.jpg"), "x");
}

TEST(StagedFolder, TwoWritersAtOnceAreAnError) {
  const TemporaryFolder folder;
  FaultyFileOps ops;
  const StagedFolder first(folder / "out", Existing::kRefuse, {}, ops);
  EXPECT_THROW(StagedFolder(folder / "out", Existing::kRefuse, {}, ops), IoError);
  EXPECT_TRUE(fs::exists(first.path()));
}

TEST(StagedFolder, EveryCallFailsInTurn) {
  constexpr Call kCalls[] = {Call::kOpen,   Call::kClose,  Call::kStat,  Call::kFstat,
                             Call::kFlock,  Call::kPwrite, Call::kFsync, Call::kRename,
                             Call::kUnlink, Call::kMkdir,  Call::kRmdir, Call::kExchange};
  int failures = 0;
  for (const bool had_old : {false, true}) {
    for (const Call call : kCalls) {
      FaultyFileOps ops;
      for (int at = 0;; ++at) {
        SCOPED_TRACE(std::to_string(static_cast<int>(call)) + " " + std::to_string(at));
        const TemporaryFolder folder;
        make_source(folder / "source");
        if (had_old) make_old(folder / "out");
        ops.fail(call, at, EIO);
        const std::string error = error_of(
            [&] { write_model(folder / "source", folder / "out", Existing::kReplace, ops); });
        if (ops.count(call) <= at) break;
        ++failures;
        const char state = state_of(folder / "out", had_old);
        EXPECT_NE(state, 0) << error;
        if (error == "no error") EXPECT_EQ(state, 'n');
        expect_clean_rerun(folder);
      }
    }
  }
  EXPECT_GE(failures, 120);
}

TEST(StagedFolder, EveryAllocationFailsInTurn) {
  FaultyFileOps ops;
  long at = 0;
  for (bool done = false; !done; ++at) {
    const TemporaryFolder folder;
    make_source(folder / "source");
    make_old(folder / "out");
    const fs::path source = folder / "source", out = folder / "out";
    try {
      allocations_left = at;
      write_model(source, out, Existing::kReplace, ops);
      done = allocations_left >= 0;
      allocations_left = -1;
    } catch (const std::exception&) {
      allocations_left = -1;
    }
    ASSERT_NE(state_of(out, true), 0) << at;
    if (at % 8 == 0) expect_clean_rerun(folder);
    ASSERT_LT(at, 10000);
  }
  EXPECT_GT(at, 200);
}

TEST(StagedFolder, ThePowerFailsBetweenAnyTwoCalls) {
  for (const bool had_old : {false, true}) {
    // Only eager renames: the files inside are renamed long before the folder is, and a disk that
    // delays one but not the other is tested with the files in core/monograph/safetensors/tests.
    for (int calls = 0;; ++calls) {
      SCOPED_TRACE(calls);
      const TemporaryFolder folder;
      make_source(folder / "source");
      if (had_old) make_old(folder / "out");
      PowerFailureOps ops(calls, Renames::kEager);
      const std::string error = error_of(
          [&] { write_model(folder / "source", folder / "out", Existing::kReplace, ops); });
      const char state = state_of(folder / "out", had_old);
      EXPECT_NE(state, 0);
      if (error == "no error") EXPECT_EQ(state, 'n');
      expect_clean_rerun(folder);
      if (!ops.failed()) {
        EXPECT_GE(calls, 30);
        break;
      }
    }
  }
}

// The process dies before the k-th call that changes anything, as by kill -9.
class KillingOps : public FileOps {
 public:
  explicit KillingOps(int calls) : calls_(calls) {}
  int open(const char* path, int flags, mode_t mode) override {
    if ((flags & O_CREAT) != 0) count();
    return FileOps::open(path, flags, mode);
  }
  ssize_t pwrite(int fd, const void* data, std::size_t size, std::uint64_t offset) override {
    count();
    return FileOps::pwrite(fd, data, size, offset);
  }
  int fsync(int /*fd*/) override { return 0; }
  int rename(const char* from, const char* to) override {
    count();
    return FileOps::rename(from, to);
  }
  int unlink(const char* path) override {
    count();
    return FileOps::unlink(path);
  }
  int mkdir(const char* path, mode_t mode) override {
    count();
    return FileOps::mkdir(path, mode);
  }
  int rmdir(const char* path) override {
    count();
    return FileOps::rmdir(path);
  }
  int exchange(const char* one, const char* other) override {
    count();
    return FileOps::exchange(one, other);
  }

 private:
  void count() {
    if (calls_-- == 0) ::_exit(9);
  }
  int calls_;
};

TEST(StagedFolder, TheProcessDiesBetweenAnyTwoCalls) {
  for (const bool had_old : {false, true}) {
    for (int calls = 0;; ++calls) {
      SCOPED_TRACE(calls);
      const TemporaryFolder folder;
      make_source(folder / "source");
      if (had_old) make_old(folder / "out");
      const pid_t child = ::fork();
      if (child == 0) {
        KillingOps ops(calls);
        const std::string error = error_of(
            [&] { write_model(folder / "source", folder / "out", Existing::kReplace, ops); });
        ::_exit(error == "no error" ? 0 : 1);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFEXITED(status));
      EXPECT_NE(state_of(folder / "out", had_old), 0);
      expect_clean_rerun(folder);
      if (WEXITSTATUS(status) == 0) {
        EXPECT_GE(calls, 25);
        break;
      }
      ASSERT_EQ(WEXITSTATUS(status), 9);
    }
  }
}

TEST(CarryOver, TheTokenizerAloneAndAllElse) {
  const TemporaryFolder folder;
  make_source(folder / "source");
  write_all(folder / "source/generation_config.json", "{}");
  for (const char* to : {"tokenizer", "rest"}) fs::create_directory(folder / to);
  EXPECT_EQ(copy_sidecars(folder / "source", folder / "tokenizer", Sidecars::kTokenizer),
            (std::vector<std::string>{"tokenizer.json", "additional_chat_templates/rag.jinja"}));
  EXPECT_EQ(copy_sidecars(folder / "source", folder / "rest", Sidecars::kAllButTokenizer),
            std::vector<std::string>{"generation_config.json"});
  EXPECT_FALSE(fs::exists(folder / "rest/additional_chat_templates"));
}

TEST(CarryOver, LinksOutOfTheFolderAreRefusedAndCachesAllowed) {
  const TemporaryFolder folder;
  make_source(folder / "source");
  fs::create_directory(folder / "to");
  write_all(folder / "secret", "secret");
  fs::create_symlink("tokenizer.json", folder / "source/vocab.txt");
  const std::vector<std::string> copied = copy_sidecars(folder / "source", folder / "to");
  EXPECT_EQ(copied, (std::vector<std::string>{"tokenizer.json", "vocab.txt",
                                              "additional_chat_templates/rag.jinja"}));
  EXPECT_FALSE(fs::is_symlink(folder / "to/vocab.txt"));
  fs::create_symlink("../secret", folder / "source/merges.txt");
  EXPECT_NE(error_of([&] { copy_sidecars(folder / "source", folder / "to"); }).find("leaves"),
            std::string::npos);
  // REPO/snapshots/REVISION/tokenizer.json -> ../../blobs/HASH
  fs::create_directories(folder / "repo/snapshots/main");
  fs::create_directories(folder / "repo/blobs");
  write_all(folder / "repo/blobs/0123", "blob");
  fs::create_symlink("../../blobs/0123", folder / "repo/snapshots/main/tokenizer.json");
  fs::create_directory(folder / "to2");
  copy_sidecars(folder / "repo/snapshots/main", folder / "to2");
  EXPECT_EQ(read_all(folder / "to2/tokenizer.json"), "blob");
}

TEST(CarryOver, LeavesWeightsAndAdaptersBehind) {
  for (const char* name : {"tokenizer.json", "chat_template.jinja", "generation_config.json",
                           "special_tokens_map.json", "LICENSE", "modeling_x.py", "merges.txt"}) {
    EXPECT_TRUE(is_sidecar(name)) << name;
  }
  for (const char* name :
       {"model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_config.json",
        "adapter_model.safetensors", "config.json", "README.md", "x.gguf", "training_args.bin",
        ".gitattributes", "hf_quant_config.json", "model.manifest.json"}) {
    EXPECT_FALSE(is_sidecar(name)) << name;
  }
}

}  // namespace
}  // namespace monograph
