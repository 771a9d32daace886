// The variant list and the driver: checks, documents, threads, scratch. No intrinsics here.
#include "monograph/kernels/gated_delta_rule/gated_delta_rule.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "monograph/base/error.h"
#include "monograph/cpu/dynamic_schedule.h"
#include "monograph/cpu/scratch.h"
#include "monograph/documents/documents.h"
#include "monograph/documents/work_units.h"
#include "monograph/kernels/gated_delta_rule/unit.h"
#include "targets.h"

namespace monograph {
namespace {

void require(bool condition, const std::string& message) {
  if (!condition) throw Error("gated_delta_rule: " + message);
}

std::vector<TokenRange> documents_of(const DeltaRuleProblem& p) {
  require(p.key_heads > 0 && p.value_heads > 0 && p.value_heads % p.key_heads == 0,
          std::to_string(p.value_heads) + " value heads are not a multiple of " +
              std::to_string(p.key_heads) + " key heads");
  for (const std::size_t size : {p.key_size, p.value_size})
    require(
        size > 0 && size <= kLargestDeltaHead,
        "head size " + std::to_string(size) + ", wanted 1 to " + std::to_string(kLargestDeltaHead));
  require(std::isfinite(p.scale), "the scale is not finite");
  require(p.tokens < std::size_t{1} << 31, "more than 2^31 tokens");
  check_offsets("gated_delta_rule", "cu", p.offsets, p.documents, p.tokens);
  std::vector<TokenRange> documents;
  for (std::size_t d = 0; d < p.documents; ++d)
    documents.push_back({p.offsets[d], p.offsets[d + 1] - p.offsets[d]});
  return documents;
}

// Documents with tokens that `takes`, `heads` units each.
template <class Takes>
std::vector<WorkUnit> units_of(const std::vector<TokenRange>& documents, std::size_t heads,
                               const Takes& takes) {
  return work_units(documents.size(), heads, [&](std::size_t d) -> std::optional<double> {
    if (documents[d].count == 0 || !takes(documents[d])) return std::nullopt;
    return static_cast<double>(documents[d].count);
  });
}

TokenRange itself(const TokenRange& range) { return range; }

void clear_heads(const std::vector<TokenRange>& documents, const DeltaRuleProblem& p,
                 const MutableHeadsView& view, std::size_t heads, std::size_t size) {
  for_gaps(documents, p.tokens, itself, [&](std::size_t begin, std::size_t end) {
    clear_tokens(view, {heads, size, size_bytes(p.dtype)}, begin, end);
  });
}

void clear_gates(const std::vector<TokenRange>& documents, const DeltaRuleProblem& p,
                 const MutableGateView& view) {
  const MutableHeadsView heads = {view.data, view.token_stride, view.head_stride};
  for_gaps(documents, p.tokens, itself, [&](std::size_t begin, std::size_t end) {
    clear_tokens(heads, {p.value_heads, 1, size_bytes(view.dtype)}, begin, end);
  });
}

// An empty document's state goes through, and so does its gradient; 0 where `from` is nullptr.
void pass_empty(const std::vector<TokenRange>& documents, const DeltaRuleProblem& p,
                const float* from, float* to) {
  const std::size_t size = p.value_heads * p.key_size * p.value_size;
  for (std::size_t d = 0; d < documents.size() && to != nullptr; ++d) {
    if (documents[d].count != 0) continue;
    if (from != nullptr)
      std::memcpy(to + d * size, from + d * size, size * sizeof(float));
    else
      std::memset(to + d * size, 0, size * sizeof(float));
  }
}

// The rows that compute few tokens directly.
const std::vector<Variant<const DeltaRuleKernels, ByDType>>& few_tokens_variants() {
  static const auto rows = make_variants<const DeltaRuleKernels>(
      MatrixTargets{}, every_dtype(), []<class V>(ByDType key) -> const DeltaRuleKernels* {
        const DeltaRuleKernels* kernels = delta_rule_kernels<V>(key.dtype);
        return kernels == nullptr || kernels->few == nullptr ? nullptr : kernels;
      });
  return rows;
}

const DeltaRuleVariant& best_variant(DType dtype) {
  const DeltaRuleVariant* found = best_row(gated_delta_rule_variants(), best_isa(), dtype);
  if (found == nullptr)
    throw Error(std::string("gated_delta_rule: no variant for ") + name_of(dtype));
  return *found;
}

}  // namespace

const std::vector<DeltaRuleVariant>& gated_delta_rule_variants() {
  static const auto rows = make_variants<const DeltaRuleKernels>(
      MatrixTargets{}, every_dtype(),
      []<class V>(ByDType key) { return delta_rule_kernels<V>(key.dtype); });
  return rows;
}

std::size_t gated_delta_rule_backward_scratch(const DeltaRuleVariant& variant,
                                              const DeltaRuleProblem& problem, std::size_t tokens) {
  return variant.run->backward_bytes(problem, static_cast<std::int64_t>(tokens));
}

void gated_delta_rule_with(const DeltaRuleVariant& variant, const DeltaRuleForward& job,
                           ParallelFor parallel_for) {
  const DeltaRuleProblem& p = job.problem;
  const std::vector<TokenRange> documents = documents_of(p);
  clear_heads(documents, p, job.out, p.value_heads, p.value_size);
  pass_empty(documents, p, p.state, job.final_state);
  const auto is_short = [](const TokenRange& d) { return d.count <= kFewTokens; };
  const auto is_long = [](const TokenRange& d) { return d.count > kFewTokens; };
  const std::vector<WorkUnit> units = units_of(documents, p.key_heads, is_long);
  const std::vector<WorkUnit> few_units = units_of(documents, p.value_heads, is_short);
  const DeltaRuleKernels& few = *best_row(few_tokens_variants(), variant.isa, variant.dtype)->run;
  dynamic_schedule(units.size() + few_units.size(), parallel_for, [&](std::size_t i) {
    if (i < units.size()) {
      const WorkUnit& ref = units[i];
      const TokenRange& d = documents[ref.document];
      const Scratch scratch(ScratchUse::kLocal, variant.run->forward_bytes(p));
      variant.run->forward({job, d.begin, d.count, ref.document, ref.head}, scratch.data());
    } else {
      const WorkUnit& ref = few_units[i - units.size()];
      const TokenRange& d = documents[ref.document];
      const std::size_t key_head = ref.head / (p.value_heads / p.key_heads);
      few.few({job, d.begin, d.count, ref.document, key_head}, ref.head);
    }
  });
}

void gated_delta_rule_backward_with(const DeltaRuleVariant& variant, const DeltaRuleBackward& job,
                                    ParallelFor parallel_for) {
  const DeltaRuleProblem& p = job.problem;
  const std::vector<TokenRange> documents = documents_of(p);
  clear_heads(documents, p, job.dq, p.key_heads, p.key_size);
  clear_heads(documents, p, job.dk, p.key_heads, p.key_size);
  clear_heads(documents, p, job.dv, p.value_heads, p.value_size);
  clear_gates(documents, p, job.dg);
  clear_gates(documents, p, job.dbeta);
  pass_empty(documents, p, job.dfinal, job.dstate);
  const std::vector<WorkUnit> units =
      units_of(documents, p.key_heads, [](const TokenRange&) { return true; });
  dynamic_schedule(units.size(), parallel_for, [&](std::size_t i) {
    const WorkUnit& ref = units[i];
    const TokenRange& d = documents[ref.document];
    const Scratch scratch(ScratchUse::kLocal, variant.run->backward_bytes(p, d.count));
    variant.run->backward({job, d.begin, d.count, ref.document, ref.head}, scratch.data());
  });
}

void gated_delta_rule(const DeltaRuleForward& job, ParallelFor parallel_for) {
  gated_delta_rule_with(best_variant(job.problem.dtype), job, parallel_for);
}

void gated_delta_rule_backward(const DeltaRuleBackward& job, ParallelFor parallel_for) {
  gated_delta_rule_backward_with(best_variant(job.problem.dtype), job, parallel_for);
}

}  // namespace monograph
