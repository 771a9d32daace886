#include "monograph/gguf/import_tensors.h"

#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/safetensors/plan.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using safetensors::shape_text;
using text::in_quotes;

class Checker {
 public:
  Checker(const FileReader& file, const ModelSizes& sizes) : file_(file), s_(sizes) {
    for (const TensorInfo& info : file.header().tensors) found_.emplace(info.name, &info);
  }

  void run() {
    want("token_embd.weight", {s_.vocabulary, s_.hidden});
    want("output_norm.weight", {s_.hidden});
    // Without it the embedding is the head, but llama.cpp opens no gpt-oss like that.
    if (s_.gpt_oss || found_.contains("output.weight")) {
      want("output.weight", {s_.vocabulary, s_.hidden});
    }
    wanted_.insert("rope_freqs.weight");
    if (s_.fused) wanted_.insert({"rope_factors_long.weight", "rope_factors_short.weight"});
    for (std::uint64_t layer = 0; layer < s_.layers; ++layer) want_layer(layer);
    for (const TensorInfo& info : file_.header().tensors) {
      if (wanted_.contains(std::string(info.name))) continue;
      fail("tensor " + in_quotes(info.name) + " is one too many for this architecture");
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(file_.path().string() + ": " + what);
  }

  void want(const std::string& name, const std::vector<std::uint64_t>& shape) {
    const auto found = found_.find(name);
    if (found == found_.end()) fail("tensor " + in_quotes(name) + " is missing");
    if (found->second->shape != shape) {
      fail("tensor " + in_quotes(name) + " is " + shape_text(found->second->shape) + ", wanted " +
           shape_text(shape));
    }
    wanted_.insert(name);
  }

  void want_linear(const std::string& name, std::uint64_t rows, std::uint64_t cols, bool bias) {
    want(name + ".weight", {rows, cols});
    if (bias) want(name + ".bias", {rows});
  }

  void want_layer(std::uint64_t layer) {
    const std::string block = "blk." + std::to_string(layer) + ".";
    const std::uint64_t queries = s_.heads * s_.head_dim, keys = s_.kv_heads * s_.head_dim;
    want(block + "attn_norm.weight", {s_.hidden});
    want(block + (s_.gpt_oss ? "post_attention_norm.weight" : "ffn_norm.weight"), {s_.hidden});
    if (s_.gpt_oss) want(block + "attn_sinks.weight", {s_.heads});
    if (s_.fused) {
      want_linear(block + "attn_qkv", queries + 2 * keys, s_.hidden, false);
      want_linear(block + "attn_output", s_.hidden, queries, false);
      want_linear(block + "ffn_up", 2 * s_.intermediate, s_.hidden, false);
      return want_linear(block + "ffn_down", s_.hidden, s_.intermediate, false);
    }
    want_linear(block + "attn_q", queries, s_.hidden, s_.query_bias);
    want_linear(block + "attn_k", keys, s_.hidden, s_.query_bias);
    want_linear(block + "attn_v", keys, s_.hidden, s_.query_bias);
    want_linear(block + "attn_output", s_.hidden, queries, s_.output_bias);
    if (s_.head_norms) {
      want(block + "attn_q_norm.weight", {s_.head_dim});
      want(block + "attn_k_norm.weight", {s_.head_dim});
    }
    if (s_.norms_behind) {
      want(block + "post_attention_norm.weight", {s_.hidden});
      want(block + "post_ffw_norm.weight", {s_.hidden});
    }
    if (s_.experts != 0) return want_experts(block);
    want_linear(block + "ffn_gate", s_.intermediate, s_.hidden, s_.mlp_bias);
    want_linear(block + "ffn_up", s_.intermediate, s_.hidden, s_.mlp_bias);
    want_linear(block + "ffn_down", s_.hidden, s_.intermediate, s_.mlp_bias);
  }

  void want_experts(const std::string& block) {
    want(block + "ffn_gate_inp.weight", {s_.experts, s_.hidden});
    want(block + "ffn_gate_exps.weight", {s_.experts, s_.expert_intermediate, s_.hidden});
    want(block + "ffn_up_exps.weight", {s_.experts, s_.expert_intermediate, s_.hidden});
    want(block + "ffn_down_exps.weight", {s_.experts, s_.hidden, s_.expert_intermediate});
    if (!s_.gpt_oss) return;
    want(block + "ffn_gate_inp.bias", {s_.experts});
    want(block + "ffn_gate_exps.bias", {s_.experts, s_.expert_intermediate});
    want(block + "ffn_up_exps.bias", {s_.experts, s_.expert_intermediate});
    want(block + "ffn_down_exps.bias", {s_.experts, s_.hidden});
  }

  const FileReader& file_;
  const ModelSizes& s_;
  std::unordered_map<std::string_view, const TensorInfo*> found_;  // a file may have a million
  std::set<std::string> wanted_;
};

}  // namespace

void check_tensors(const FileReader& file, const ModelSizes& sizes) { Checker(file, sizes).run(); }

}  // namespace monograph::gguf
