// libFuzzer: any offsets of documents, ascending or not. They are refused exactly if they break the
// rule of documents.h, and a document beside others has the bits it has alone, on each set.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/kernels/varlen_attention/varlen_attention.h"

namespace monograph {
namespace {

constexpr std::size_t kTokens = 40, kHeads = 2, kSize = 8;

void require(bool condition) {
  if (!condition) std::abort();
}

struct Rows {
  std::vector<float> values;
  HeadsView view() const { return {values.data(), kHeads * kSize, kSize}; }
  MutableHeadsView mutable_view() { return {values.data(), kHeads * kSize, kSize}; }
};

// Whole numbers over 16, the same for every run.
Rows numbers(std::uint32_t seed) {
  Rows rows{std::vector<float>(kTokens * kHeads * kSize)};
  for (float& value : rows.values) {
    seed = seed * 1664525U + 1013904223U;
    value = static_cast<float>(static_cast<int>(seed >> 27U) - 16) / 16;
  }
  return rows;
}

bool ascends(const std::vector<std::int32_t>& offsets) {
  if (offsets.front() < 0 || offsets.back() > static_cast<std::int32_t>(kTokens)) return false;
  for (std::size_t i = 1; i < offsets.size(); ++i)
    if (offsets[i - 1] > offsets[i]) return false;
  return true;
}

struct Result {
  Rows out = numbers(9);  // every row is written, whatever stood there
  std::vector<float> lse = std::vector<float>(kHeads * kTokens, 7);
};

struct Question {
  bool causal;
  std::int64_t window;
  float softcap;
};

Result attend(const AttentionVariant& variant, const Question& question,
              const std::vector<std::int32_t>& offsets) {
  static const Rows q = numbers(1), k = numbers(2), v = numbers(3);
  Result result;
  AttentionForward job{};
  job.problem = {.dtype = DType::kFloat32,
                 .query_tokens = kTokens,
                 .key_tokens = kTokens,
                 .heads = kHeads,
                 .kv_heads = kHeads,
                 .key_size = kSize,
                 .value_size = kSize,
                 .causal = question.causal,
                 .window = question.window,
                 .scale = 0.25F,
                 .softcap = question.softcap,
                 .sinks = nullptr,
                 .documents = {offsets.size() - 1, offsets.data(), offsets.data(), nullptr}};
  job.q = q.view();
  job.k = k.view();
  job.v = v.view();
  job.out = result.out.mutable_view();
  job.lse = result.lse.data();
  varlen_attention_with(variant, job, serial_for, 1);
  return result;
}

// Rows of [begin, end) are those of `alone`; nothing of them may depend on the other documents.
void require_same(const Result& together, const Result& alone, std::int32_t begin,
                  std::int32_t end) {
  const std::size_t row = kHeads * kSize * sizeof(float);
  const auto count = static_cast<std::size_t>(end - begin);
  const std::size_t first = static_cast<std::size_t>(begin) * kHeads * kSize;
  require(std::memcmp(&together.out.values[first], &alone.out.values[first], count * row) == 0);
  for (std::size_t h = 0; h < kHeads; ++h) {
    const std::size_t at = h * kTokens + static_cast<std::size_t>(begin);
    require(std::memcmp(&together.lse[at], &alone.lse[at], count * sizeof(float)) == 0);
  }
}

void check(const Question& question, const std::vector<std::int32_t>& offsets) {
  const bool valid = ascends(offsets);
  for (const AttentionVariant& variant : varlen_attention_variants()) {
    if (variant.isa > detected_isa() || variant.dtype != DType::kFloat32) continue;
    Result together;
    try {
      together = attend(variant, question, offsets);
    } catch (const Error&) {
      require(!valid);
      continue;
    }
    require(valid);
    for (std::size_t d = 0; d + 1 < offsets.size(); ++d) {
      if (offsets[d] == offsets[d + 1]) continue;
      const Result alone = attend(variant, question, {offsets[d], offsets[d + 1]});
      require_same(together, alone, offsets[d], offsets[d + 1]);
    }
    // A token of no document is zero.
    for (std::int32_t t = offsets.back(); t < static_cast<std::int32_t>(kTokens); ++t)
      require(together.out.values[static_cast<std::size_t>(t) * kHeads * kSize] == 0);
  }
}

}  // namespace
}  // namespace monograph

// Bytes: mask, window, cap, how offsets are written; then the offsets, as steps or as they are.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 5 || size > 40) return 0;
  const monograph::Question question{data[0] % 2 == 0, data[1] % 48,
                                     data[2] % 2 == 0 ? 0.0F : 5.0F};
  std::vector<std::int32_t> offsets;
  if (data[3] % 2 == 0) {
    std::int32_t at = 0;
    for (std::size_t i = 4; i < size; ++i)
      offsets.push_back(at += static_cast<std::int8_t>(data[i]) % 16);
  } else {
    for (std::size_t i = 4; i + 4 <= size; i += 4)
      std::memcpy(&offsets.emplace_back(), data + i, sizeof(std::int32_t));
  }
  if (offsets.size() < 2) return 0;
  monograph::check(question, offsets);
  return 0;
}
