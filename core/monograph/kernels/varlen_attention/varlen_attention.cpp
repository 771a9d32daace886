// The variant list and the driver: checks, documents, threads, scratch. No intrinsics here.
#include "monograph/kernels/varlen_attention/varlen_attention.h"

#include <algorithm>
#include <optional>
#include <string>

#include "monograph/base/error.h"
#include "monograph/cpu/dynamic_schedule.h"
#include "monograph/cpu/scratch.h"
#include "monograph/documents/documents.h"
#include "monograph/documents/work_units.h"
#include "monograph/kernels/varlen_attention/unit.h"
#include "targets.h"

namespace monograph {
namespace {

// Work (query-key pairs times heads) below which a unit is not worth waking threads for.
constexpr double kSmallUnit = 64 * 1024;

void require(bool condition, const std::string& message) {
  if (!condition) throw Error("varlen_attention: " + message);
}

void check_sizes(const AttentionProblem& p) {
  require(p.kv_heads > 0 && p.heads % p.kv_heads == 0,
          std::to_string(p.heads) + " heads are not a multiple of " + std::to_string(p.kv_heads) +
              " key-value heads");
  for (const std::size_t size : {p.key_size, p.value_size})
    require(size > 0 && size <= kLargestAttentionHead, "head size " + std::to_string(size) +
                                                           ", wanted 1 to " +
                                                           std::to_string(kLargestAttentionHead));
  require(p.scale >= 0, "the scale is negative or not a number");
  require(p.softcap >= 0, "the soft-cap is negative or not a number");
  require(p.window >= 0, "the window is negative");
  require(std::max(p.query_tokens, p.key_tokens) < std::size_t{1} << 31, "more than 2^31 tokens");
}

std::vector<Document> documents_of(const AttentionProblem& p) {
  check_sizes(p);
  const AttentionDocuments& given = p.documents;
  check_offsets("varlen_attention", "query_offsets", given.query_offsets, given.count,
                p.query_tokens);
  check_offsets("varlen_attention", "key_offsets", given.key_offsets, given.count, p.key_tokens);
  std::vector<Document> documents;
  for (std::size_t d = 0; d < given.count; ++d) {
    const std::int32_t room = given.key_offsets[d + 1] - given.key_offsets[d];
    const std::int32_t keys = given.key_lengths != nullptr ? given.key_lengths[d] : room;
    require(keys >= 0 && keys <= room, "key_lengths[" + std::to_string(d) + "] is " +
                                           std::to_string(keys) + ", the document has room for " +
                                           std::to_string(room));
    const std::int32_t queries = given.query_offsets[d + 1] - given.query_offsets[d];
    documents.push_back({given.query_offsets[d], queries, given.key_offsets[d], keys});
  }
  return documents;
}

// Pairs that a document's queries see; exact to a block for the balance of threads.
double work_of(const AttentionProblem& p, const Document& d) {
  constexpr std::int64_t kStep = 64;
  const Visibility sees = visibility(p, d);
  double pairs = 0;
  for (std::int64_t i = 0; i < d.queries; i += kStep)
    pairs += static_cast<double>(kStep * std::max<std::int64_t>(sees.end(i) - sees.begin(i), 1));
  const std::size_t group = p.heads / p.kv_heads;
  return pairs * static_cast<double>(group);
}

// One document and one key-value head each.
std::vector<WorkUnit> units_of(const AttentionProblem& p, const std::vector<Document>& documents) {
  return work_units(documents.size(), p.kv_heads, [&](std::size_t i) -> std::optional<double> {
    const Document& d = documents[i];
    if (d.queries == 0 && d.keys == 0) return std::nullopt;
    return work_of(p, d);
  });
}

std::size_t ceil_div(std::int64_t count, std::int64_t block) {
  return static_cast<std::size_t>((count + block - 1) / block);
}

TokenRange queries_of(const Document& d) { return {d.query_begin, d.queries}; }
TokenRange keys_of(const Document& d) { return {d.key_begin, d.keys}; }

// Zero in the rows of queries, or of keys, that are in no document.
void clear_queries(const std::vector<Document>& documents, const AttentionProblem& p,
                   const MutableHeadsView& view, std::size_t size) {
  for_gaps(documents, p.query_tokens, queries_of, [&](std::size_t begin, std::size_t end) {
    clear_tokens(view, {p.heads, size, size_bytes(p.dtype)}, begin, end);
  });
}

void clear_keys(const std::vector<Document>& documents, const AttentionProblem& p,
                const MutableHeadsView& view, std::size_t size) {
  for_gaps(documents, p.key_tokens, keys_of, [&](std::size_t begin, std::size_t end) {
    clear_tokens(view, {p.kv_heads, size, size_bytes(p.dtype)}, begin, end);
  });
}

void run_shared(const ForwardKernel& kernel, const ForwardUnit& unit, ParallelFor parallel_for) {
  const AttentionProblem& p = unit.job.problem;
  dynamic_schedule(ceil_div(unit.document.keys, kernel.key_block), parallel_for,
                   [&](std::size_t b) { kernel.pack(unit, static_cast<std::int64_t>(b)); });
  // The last queries see the most keys: longest first.
  const std::size_t blocks = ceil_div(unit.document.queries, kernel.query_block);
  dynamic_schedule(blocks, parallel_for, [&](std::size_t b) {
    const Scratch scratch(ScratchUse::kLocal, kernel.scratch_bytes(p));
    kernel.attend(unit, static_cast<std::int64_t>(blocks - 1 - b), scratch.data());
  });
}

void run_alone(const ForwardKernel& kernel, const ForwardUnit& unit, std::byte* scratch) {
  const std::int64_t keys =
      static_cast<std::int64_t>(ceil_div(unit.document.keys, kernel.key_block));
  const std::int64_t queries =
      static_cast<std::int64_t>(ceil_div(unit.document.queries, kernel.query_block));
  for (std::int64_t b = 0; b < keys; ++b) kernel.pack(unit, b);
  for (std::int64_t b = 0; b < queries; ++b) kernel.attend(unit, b, scratch);
}

void run_shared(const BackwardKernel& kernel, const BackwardUnit& unit, float* dsinks,
                ParallelFor parallel_for) {
  const AttentionProblem& p = unit.job.problem;
  const std::size_t group = unit.group(), first_head = unit.kv_head * group;
  const std::size_t keys = ceil_div(unit.document.keys, kernel.key_block);
  const std::size_t queries = ceil_div(unit.document.queries, kernel.query_block);
  dynamic_schedule(keys + group * queries, parallel_for, [&](std::size_t b) {
    if (b < keys) return kernel.pack_keys(unit, static_cast<std::int64_t>(b));
    const std::size_t g = (b - keys) / queries;
    kernel.pack_queries(unit, first_head + g, g, static_cast<std::int64_t>((b - keys) % queries));
  });
  dynamic_schedule(keys + group * queries, parallel_for, [&](std::size_t b) {
    const Scratch scratch(ScratchUse::kLocal, kernel.scratch_bytes(p));
    if (b < keys) return kernel.key_gradients(unit, static_cast<std::int64_t>(b), scratch.data());
    const std::size_t g = (b - keys) / queries;
    const std::size_t block = queries - 1 - (b - keys) % queries;
    kernel.query_gradients(unit, g, static_cast<std::int64_t>(block), scratch.data());
    if (dsinks != nullptr && block == 0)
      dsinks[first_head + g] = kernel.sink_gradient(unit, first_head + g, g);
  });
}

void run_backward_unit(const BackwardKernel& kernel, const BackwardUnit& unit, float* dsinks) {
  const AttentionProblem& p = unit.job.problem;
  const Scratch scratch(ScratchUse::kLocal, kernel.scratch_bytes(p));
  const Scratch sums(ScratchUse::kSums, kernel.sums_bytes(p, unit.document));
  kernel.differentiate(unit, scratch.data(), sums.data(), dsinks);
}

// The rows that have a forward for few queries.
const std::vector<Variant<const ForwardKernel, ByDType>>& few_queries_variants() {
  static const auto rows =
      make_variants<const ForwardKernel>(MatrixTargets{}, every_dtype(), []<class V>(ByDType key) {
        const AttentionKernels* kernels = attention_kernels<V>(key.dtype);
        return kernels == nullptr ? nullptr : kernels->few;
      });
  return rows;
}

const AttentionVariant& best_variant(DType dtype) {
  const AttentionVariant* found = best_row(varlen_attention_variants(), best_isa(), dtype);
  if (found == nullptr)
    throw Error(std::string("varlen_attention: no variant for ") + name_of(dtype));
  return *found;
}

}  // namespace

const std::vector<AttentionVariant>& varlen_attention_variants() {
  static const auto rows = make_variants<const AttentionKernels>(
      MatrixTargets{}, every_dtype(),
      []<class V>(ByDType key) { return attention_kernels<V>(key.dtype); });
  return rows;
}

void varlen_attention_with(const AttentionVariant& variant, const AttentionForward& job,
                           ParallelFor parallel_for, int threads) {
  const AttentionProblem& p = job.problem;
  const std::vector<Document> documents = documents_of(p);
  const std::vector<WorkUnit> units = units_of(p, documents);
  clear_queries(documents, p, job.out, p.value_size);
  for_gaps(documents, p.query_tokens, queries_of, [&](std::size_t begin, std::size_t end) {
    for (std::size_t h = 0; h < p.heads; ++h)
      std::fill(job.lse + h * p.query_tokens + begin, job.lse + h * p.query_tokens + end, 0.f);
  });
  const ForwardKernel& few = *best_row(few_queries_variants(), variant.isa, variant.dtype)->run;
  const auto kernel_of = [&](const Document& d) -> const ForwardKernel& {
    return d.queries <= kFewQueries ? few : *variant.run->forward;
  };
  // Cutting a unit costs two more waits and no work, so it pays early.
  const std::size_t shared = count_shared(units, threads, 0.25, kSmallUnit);
  for (std::size_t u = 0; u < shared; ++u) {
    const Document& d = documents[units[u].document];
    const Scratch packed(ScratchUse::kShared, kernel_of(d).packed_bytes(p, d));
    run_shared(kernel_of(d), {job, d, units[u].head, packed.data()}, parallel_for);
  }
  dynamic_schedule(units.size() - shared, parallel_for, [&](std::size_t i) {
    const WorkUnit& ref = units[shared + i];
    const Document& d = documents[ref.document];
    const ForwardKernel& kernel = kernel_of(d);
    const Scratch packed(ScratchUse::kShared, kernel.packed_bytes(p, d));
    const Scratch scratch(ScratchUse::kLocal, kernel.scratch_bytes(p));
    run_alone(kernel, {job, d, ref.head, packed.data()}, scratch.data());
  });
}

void varlen_attention_backward_with(const AttentionVariant& variant, const AttentionBackward& job,
                                    ParallelFor parallel_for, int threads) {
  const AttentionProblem& p = job.problem;
  const BackwardKernel& kernel = *variant.run->backward;
  const std::vector<Document> documents = documents_of(p);
  const std::vector<WorkUnit> units = units_of(p, documents);
  clear_queries(documents, p, job.dq, p.key_size);
  clear_keys(documents, p, job.dk, p.key_size);
  clear_keys(documents, p, job.dv, p.value_size);
  std::vector<float> dsinks(job.dsinks != nullptr ? documents.size() * p.heads : 0);
  const auto dsinks_of = [&](const WorkUnit& ref) {
    return dsinks.empty() ? nullptr : dsinks.data() + ref.document * p.heads;
  };
  // A cut unit computes its scores twice: only for one that would outlast all the rest.
  const std::size_t shared = count_shared(units, threads, 1, kSmallUnit);
  for (std::size_t u = 0; u < shared; ++u) {
    const Document& d = documents[units[u].document];
    const Scratch packed(ScratchUse::kShared, kernel.packed_bytes(p, d, p.heads / p.kv_heads));
    run_shared(kernel, {job, d, units[u].head, packed.data()}, dsinks_of(units[u]), parallel_for);
  }
  dynamic_schedule(units.size() - shared, parallel_for, [&](std::size_t i) {
    const WorkUnit& ref = units[shared + i];
    const Document& d = documents[ref.document];
    const Scratch packed(ScratchUse::kShared, kernel.packed_bytes(p, d, 1));
    run_backward_unit(kernel, {job, d, ref.head, packed.data()}, dsinks_of(ref));
  });
  for (std::size_t h = 0; h < p.heads && job.dsinks != nullptr; ++h) {
    double sum = 0;  // documents in order
    for (std::size_t d = 0; d < documents.size(); ++d) sum += dsinks[d * p.heads + h];
    job.dsinks[h] = static_cast<float>(sum);
  }
}

void varlen_attention(const AttentionForward& job, ParallelFor parallel_for, int threads) {
  varlen_attention_with(best_variant(job.problem.dtype), job, parallel_for, threads);
}

void varlen_attention_backward(const AttentionBackward& job, ParallelFor parallel_for,
                               int threads) {
  varlen_attention_backward_with(best_variant(job.problem.dtype), job, parallel_for, threads);
}

}  // namespace monograph
