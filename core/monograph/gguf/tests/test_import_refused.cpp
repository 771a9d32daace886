// Settings that contradict each other, in a file that is whole: each an error, soon and in little
// memory.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "monograph/base/error.h"
#include "monograph/gguf/import.h"
#include "monograph/gguf/import_config.h"
#include "monograph/gguf/import_tokenizer.h"

namespace monograph::gguf {
namespace {

// One layer of 8 columns, 2 heads of 4 and one of keys; what a test changes goes first.
struct Model {
  std::string architecture = "llama";
  std::uint32_t layers = 1, heads = 2, kv_heads = 1, head_dim = 4;
  std::vector<std::string> tokens = {"a", "b", "c"};
  std::vector<float> rope_factors;
  Metadata more;

  std::filesystem::path write() const {
    const std::string begin = architecture + ".";
    Metadata all;
    all.add("general.architecture", architecture);
    all.add(begin + "block_count", layers);
    all.add(begin + "context_length", std::uint32_t{16});
    all.add(begin + "embedding_length", std::uint32_t{8});
    all.add(begin + "feed_forward_length", std::uint32_t{12});
    all.add(begin + "attention.head_count", heads);
    all.add(begin + "attention.head_count_kv", kv_heads);
    all.add(begin + "attention.key_length", head_dim);
    all.add(begin + "attention.value_length", head_dim);
    all.add(begin + "attention.layer_norm_rms_epsilon", 1e-5f);
    if (architecture == "gemma3") all.add(begin + "attention.sliding_window", std::uint32_t{8});
    all.add("tokenizer.ggml.model", "gpt2");
    all.add("tokenizer.ggml.pre", "qwen2");
    all.add("tokenizer.ggml.tokens", tokens);
    all.add("tokenizer.ggml.token_type", std::vector<std::int32_t>(tokens.size(), 1));
    all.add("tokenizer.ggml.merges", std::span<const std::string>());
    all.append(more);
    std::vector<TensorInfo> infos;
    const auto add = [&](const std::string& name, std::vector<std::uint64_t> shape) {
      TensorInfo& info = infos.emplace_back();
      info.name = name;
      info.shape = std::move(shape);
    };
    add("token_embd.weight", {3, 8});
    add("output_norm.weight", {8});
    if (!rope_factors.empty()) add("rope_freqs.weight", {rope_factors.size()});
    for (const char* norm : {"attn_norm", "ffn_norm"}) {
      add("blk.0." + std::string(norm) + ".weight", {8});
    }
    const std::uint64_t queries = std::uint64_t{heads} * head_dim;
    const std::uint64_t keys = std::uint64_t{kv_heads} * head_dim;
    add("blk.0.attn_q.weight", {queries, 8});
    add("blk.0.attn_k.weight", {keys, 8});
    add("blk.0.attn_v.weight", {keys, 8});
    add("blk.0.attn_output.weight", {8, queries});
    add("blk.0.ffn_gate.weight", {12, 8});
    add("blk.0.ffn_up.weight", {12, 8});
    add("blk.0.ffn_down.weight", {8, 12});
    const FilePlan plan = plan_file(all, infos);
    const auto path = std::filesystem::temp_directory_path() /
                      ("monograph-refused-" + std::to_string(getpid()) + ".gguf");
    std::ofstream out(path, std::ios::binary);
    out << plan.header;
    for (const TensorInfo& info : plan.tensors) {
      std::string bytes(info.size_bytes, '\0');
      if (info.name == "rope_freqs.weight") {
        std::memcpy(bytes.data(), rope_factors.data(), bytes.size());
      }
      bytes.resize((bytes.size() + 31) / 32 * 32);
      out << bytes;
    }
    return path;
  }
};

std::string message_of(const Model& model) {
  const FileReader file(model.write());
  std::filesystem::remove(file.path());
  try {
    import_config(file, DType::kFloat32);
    plan_import(file);
    import_tokenizer(file.header(), file.path().string());
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(GgufImportRefused, OneThingAtATime) {
  ASSERT_EQ(message_of({}), "");
  struct Case {
    const char* message;
    std::function<void(Model&)> change;
  };
  const std::array cases = {
      Case{"block_count is 4294967295, the file has", [](Model& m) { m.layers = 0xffffffff; }},
      Case{"gemma3.block_count is 4294967295",
           [](Model& m) { m.architecture = "gemma3", m.layers = 0xffffffff; }},
      Case{"wanted a multiple of head_count_kv, 2", [](Model& m) { m.heads = 3, m.kv_heads = 2; }},
      Case{"key_length is 3, wanted an even number", [](Model& m) { m.head_dim = 3; }},
      Case{"rope_freqs.weight: its numbers are not",
           [](Model& m) {
             m.rope_factors = {0, 0};
           }},
      Case{"rope_freqs.weight: its numbers are not",
           [](Model& m) {
             m.rope_factors = {-1, -1};
           }},
      Case{"has 4 tokens, token_embd.weight 3 rows", [](Model& m) { m.tokens.push_back("d"); }},
      Case{"one of several parts", [](Model& m) { m.more.add("split.count", "3"); }},
      Case{"one of 3 parts", [](Model& m) { m.more.add("split.count", std::uint32_t{3}); }},
  };
  for (const Case& one : cases) {
    Model model;
    one.change(model);
    const std::string found = message_of(model);
    EXPECT_NE(found.find(one.message), std::string::npos) << one.message << ": " << found;
  }
}

}  // namespace
}  // namespace monograph::gguf
