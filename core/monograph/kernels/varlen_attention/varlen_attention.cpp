// The variant list and the driver: checks, documents, threads, scratch. No intrinsics here.
#include "monograph/kernels/varlen_attention/varlen_attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "monograph/base/error.h"
#include "monograph/cpu/scratch.h"
#include "monograph/kernels/varlen_attention/unit.h"
#include "targets.h"

namespace monograph {
namespace {

// Work (query-key pairs times heads) below which a unit is not worth waking threads for.
constexpr double kSmallUnit = 64 * 1024;

struct UnitRef {
  std::size_t document, kv_head;
  double work;
};

void require(bool condition, const std::string& message) {
  if (!condition) throw Error("varlen_attention: " + message);
}

void check_sizes(const AttentionProblem& p) {
  require(p.kv_heads > 0 && p.heads % p.kv_heads == 0,
          std::to_string(p.heads) + " heads are not a multiple of " + std::to_string(p.kv_heads) +
              " key-value heads");
  for (const std::size_t size : {p.key_size, p.value_size})
    require(size > 0 && size <= kLargestHead,
            "head size " + std::to_string(size) + ", wanted 1 to " + std::to_string(kLargestHead));
  require(p.scale >= 0, "the scale is negative or not a number");
  require(p.softcap >= 0, "the soft-cap is negative or not a number");
  require(p.window >= 0, "the window is negative");
  require(std::max(p.query_tokens, p.key_tokens) < std::size_t{1} << 31, "more than 2^31 tokens");
}

void check_offsets(const std::int32_t* offsets, std::size_t count, std::size_t tokens,
                   const char* name) {
  require(offsets[0] >= 0, std::string(name) + "[0] is " + std::to_string(offsets[0]));
  for (std::size_t d = 0; d < count; ++d)
    require(offsets[d] <= offsets[d + 1], std::string(name) + "[" + std::to_string(d + 1) +
                                              "] is " + std::to_string(offsets[d + 1]) +
                                              ", below the one before it");
  require(static_cast<std::size_t>(offsets[count]) <= tokens,
          std::string(name) + " ends at " + std::to_string(offsets[count]) + ", there are " +
              std::to_string(tokens) + " tokens");
}

std::vector<Document> documents_of(const AttentionProblem& p) {
  check_sizes(p);
  const AttentionDocuments& given = p.documents;
  check_offsets(given.query_offsets, given.count, p.query_tokens, "query_offsets");
  check_offsets(given.key_offsets, given.count, p.key_tokens, "key_offsets");
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

// Largest first, so that the last ones to be taken are short.
std::vector<UnitRef> units_of(const AttentionProblem& p, const std::vector<Document>& documents) {
  std::vector<UnitRef> units;
  for (std::size_t d = 0; d < documents.size(); ++d) {
    if (documents[d].queries == 0 && documents[d].keys == 0) continue;
    const double work = work_of(p, documents[d]);
    for (std::size_t h = 0; h < p.kv_heads; ++h) units.push_back({d, h, work});
  }
  std::stable_sort(units.begin(), units.end(),
                   [](const UnitRef& a, const UnitRef& b) { return a.work > b.work; });
  return units;
}

// How many units at the front are so large that one thread each would leave the others waiting.
std::size_t count_shared(const std::vector<UnitRef>& units, int threads, double share) {
  if (threads <= 1) return 0;
  double total = 0;
  for (const UnitRef& unit : units) total += unit.work;
  const double limit = std::max(kSmallUnit, share * total / threads);
  std::size_t count = 0;
  while (count < units.size() && units[count].work > limit) ++count;
  return count;
}

// body(index) for [0, count), each taken by the next free thread: ranges cut in advance would
// follow the number of units, not their length.
template <class Body>
void take_in_turn(std::size_t count, ParallelFor parallel_for, const Body& body) {
  std::atomic<std::size_t> next = 0;
  parallel_for(count, 1, [&](std::size_t, std::size_t) {
    for (std::size_t i = next++; i < count; i = next++) body(i);
  });
}

std::size_t ceil_div(std::int64_t count, std::int64_t block) {
  return static_cast<std::size_t>((count + block - 1) / block);
}

// Zero in the rows [begin, end) of a [tokens, heads, size] output.
void clear_rows(const MutableHeadsView& view, std::size_t begin, std::size_t end, std::size_t heads,
                std::size_t row_bytes, std::size_t element_bytes) {
  for (std::size_t t = begin; t < end; ++t)
    for (std::size_t h = 0; h < heads; ++h) {
      const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(t) * view.token_stride +
                                static_cast<std::ptrdiff_t>(h) * view.head_stride;
      std::memset(
          static_cast<std::byte*>(view.data) + at * static_cast<std::ptrdiff_t>(element_bytes), 0,
          row_bytes);
    }
}

// body(begin, end) for the gaps that the documents leave in [0, tokens).
template <class Begin, class Length, class Body>
void for_gaps(const std::vector<Document>& documents, std::size_t tokens, Begin begin,
              Length length, const Body& body) {
  std::size_t covered = 0;
  for (const Document& d : documents) {
    body(covered, std::max(covered, static_cast<std::size_t>(d.*begin)));
    covered = std::max(covered, static_cast<std::size_t>(d.*begin + d.*length));
  }
  body(covered, tokens);
}

void clear_queries(const std::vector<Document>& documents, const AttentionProblem& p,
                   const MutableHeadsView& view, std::size_t size) {
  const std::size_t bytes = size_bytes(p.dtype);
  for_gaps(documents, p.query_tokens, &Document::query_begin, &Document::queries,
           [&](std::size_t begin, std::size_t end) {
             clear_rows(view, begin, end, p.heads, size * bytes, bytes);
           });
}

void clear_keys(const std::vector<Document>& documents, const AttentionProblem& p,
                const MutableHeadsView& view, std::size_t size) {
  const std::size_t bytes = size_bytes(p.dtype);
  for_gaps(documents, p.key_tokens, &Document::key_begin, &Document::keys,
           [&](std::size_t begin, std::size_t end) {
             clear_rows(view, begin, end, p.kv_heads, size * bytes, bytes);
           });
}

void run_shared(const ForwardKernel& kernel, const ForwardUnit& unit, ParallelFor parallel_for) {
  const AttentionProblem& p = unit.job.problem;
  take_in_turn(ceil_div(unit.document.keys, kernel.key_block), parallel_for,
               [&](std::size_t b) { kernel.pack(unit, static_cast<std::int64_t>(b)); });
  // The last queries see the most keys: longest first.
  const std::size_t blocks = ceil_div(unit.document.queries, kernel.query_block);
  take_in_turn(blocks, parallel_for, [&](std::size_t b) {
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
  take_in_turn(keys + group * queries, parallel_for, [&](std::size_t b) {
    if (b < keys) return kernel.pack_keys(unit, static_cast<std::int64_t>(b));
    const std::size_t g = (b - keys) / queries;
    kernel.pack_queries(unit, first_head + g, g, static_cast<std::int64_t>((b - keys) % queries));
  });
  take_in_turn(keys + group * queries, parallel_for, [&](std::size_t b) {
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
  const std::vector<UnitRef> units = units_of(p, documents);
  clear_queries(documents, p, job.out, p.value_size);
  for_gaps(documents, p.query_tokens, &Document::query_begin, &Document::queries,
           [&](std::size_t begin, std::size_t end) {
             for (std::size_t h = 0; h < p.heads; ++h)
               std::fill(job.lse + h * p.query_tokens + begin, job.lse + h * p.query_tokens + end,
                         0.f);
           });
  const ForwardKernel& few = *best_row(few_queries_variants(), variant.isa, variant.dtype)->run;
  const auto kernel_of = [&](const Document& d) -> const ForwardKernel& {
    return d.queries <= kFewQueries ? few : *variant.run->forward;
  };
  // Cutting a unit costs two more waits and no work, so it pays early.
  const std::size_t shared = count_shared(units, threads, 0.25);
  for (std::size_t u = 0; u < shared; ++u) {
    const Document& d = documents[units[u].document];
    const Scratch packed(ScratchUse::kShared, kernel_of(d).packed_bytes(p, d));
    run_shared(kernel_of(d), {job, d, units[u].kv_head, packed.data()}, parallel_for);
  }
  take_in_turn(units.size() - shared, parallel_for, [&](std::size_t i) {
    const UnitRef& ref = units[shared + i];
    const Document& d = documents[ref.document];
    const ForwardKernel& kernel = kernel_of(d);
    const Scratch packed(ScratchUse::kShared, kernel.packed_bytes(p, d));
    const Scratch scratch(ScratchUse::kLocal, kernel.scratch_bytes(p));
    run_alone(kernel, {job, d, ref.kv_head, packed.data()}, scratch.data());
  });
}

void varlen_attention_backward_with(const AttentionVariant& variant, const AttentionBackward& job,
                                    ParallelFor parallel_for, int threads) {
  const AttentionProblem& p = job.problem;
  const BackwardKernel& kernel = *variant.run->backward;
  const std::vector<Document> documents = documents_of(p);
  const std::vector<UnitRef> units = units_of(p, documents);
  clear_queries(documents, p, job.dq, p.key_size);
  clear_keys(documents, p, job.dk, p.key_size);
  clear_keys(documents, p, job.dv, p.value_size);
  std::vector<float> dsinks(job.dsinks != nullptr ? documents.size() * p.heads : 0);
  const auto dsinks_of = [&](const UnitRef& ref) {
    return dsinks.empty() ? nullptr : dsinks.data() + ref.document * p.heads;
  };
  // A cut unit computes its scores twice: only for one that would outlast all the rest.
  const std::size_t shared = count_shared(units, threads, 1);
  for (std::size_t u = 0; u < shared; ++u) {
    const Document& d = documents[units[u].document];
    const Scratch packed(ScratchUse::kShared, kernel.packed_bytes(p, d, p.heads / p.kv_heads));
    run_shared(kernel, {job, d, units[u].kv_head, packed.data()}, dsinks_of(units[u]),
               parallel_for);
  }
  take_in_turn(units.size() - shared, parallel_for, [&](std::size_t i) {
    const UnitRef& ref = units[shared + i];
    const Document& d = documents[ref.document];
    const Scratch packed(ScratchUse::kShared, kernel.packed_bytes(p, d, 1));
    run_backward_unit(kernel, {job, d, ref.kv_head, packed.data()}, dsinks_of(ref));
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
