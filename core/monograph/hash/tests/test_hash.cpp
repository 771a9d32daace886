#include <gtest/gtest.h>

#include "monograph/files/tests/temporary_folder.h"
#include "monograph/hash/checkpoint_hash.h"
#include "monograph/hash/sha256.h"
#include "monograph/safetensors/writer.h"

namespace monograph {
namespace {

using namespace files;
using namespace safetensors;

std::string sha256(std::string_view text) {
  Sha256 hash;
  hash.add(text);
  return hash.hex();
}

TEST(Sha256, TheExamplesOfTheStandard) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesOfAnyLengthGiveTheSame) {
  const std::string text(300, 'x');
  for (std::size_t length = 0; length <= 200; ++length) {
    const std::string whole = sha256(std::string_view(text).substr(0, length));
    for (const std::size_t piece : {1, 7, 63, 64, 65}) {
      Sha256 hash;
      for (std::size_t at = 0; at < length; at += piece) {
        hash.add(std::string_view(text).substr(at, std::min<std::size_t>(piece, length - at)));
      }
      ASSERT_EQ(hash.hex(), whole) << length << " in pieces of " << piece;
    }
  }
}

TEST(Sha256, EveryInnerLoopGivesTheSame) {
  std::vector<std::uint8_t> bytes(64 * 33);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * i >> 3);
  for (std::size_t blocks = 0; blocks <= 33; ++blocks) {
    Sha256State one = {1, 2, 3, 4, 0xffffffff, 6, 7, 8}, other = one;
    sha256_blocks_scalar(one, bytes.data(), blocks);
    sha256_blocks()(other, bytes.data(), blocks);
    ASSERT_EQ(one, other) << blocks;
  }
}

TEST(CheckpointHash, IsThatOfTheTensorsNotOfTheFiles) {
  const std::vector<TensorSpec> tensors = {{"b", StoredDType::kU8, {2, 3}},
                                           {"a\"", StoredDType::kF32, {}}};
  const auto write = [&](const TemporaryFolder& folder, std::uint64_t shard_bytes, char value) {
    ShardedWriter writer(folder.path(), plan_shards(tensors, {}, shard_bytes));
    for (const TensorSpec& spec : tensors) {
      writer.write(spec.name, 0, std::vector<std::uint8_t>(size_bytes(spec), value));
    }
    writer.finish();
    std::uint64_t bytes = 0;
    ThreadPool pool(2);
    std::mutex mutex;
    const std::string hash = checkpoint_sha256(
        Checkpoint::open(folder.path()),
        [&](std::size_t n, std::size_t grain, ParallelBody body) {
          pool.parallel_for(n, grain, body);
        },
        [&](std::uint64_t done) {
          const std::lock_guard lock(mutex);
          bytes += done;
        });
    EXPECT_EQ(bytes, 10u);
    return hash;
  };
  const TemporaryFolder one, two, other;
  const std::string hash = write(one, 1000, 'v');
  EXPECT_EQ(write(two, 5, 'v'), hash);
  EXPECT_NE(write(other, 1000, 'w'), hash);
  EXPECT_EQ(hash, sha256("\"a\\\"\" F32 [] " + sha256("vvvv") + "\n\"b\" U8 [2, 3] " +
                         sha256("vvvvvv") + "\n"));
}

}  // namespace
}  // namespace monograph
