// monograph diff: how two checkpoints differ, weight by weight, whatever their formats.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <set>

#include "command.h"
#include "convert_folder.h"
#include "gguf_file.h"
#include "model.h"
#include "monograph/cpu/parallel.h"
#include "monograph/weights/experts.h"
#include "next_step.h"
#include "pattern.h"
#include "table.h"

namespace monograph::cli {
namespace {

struct Options {
  std::string a, b;
  std::vector<std::string> names;
  double tolerance = 0;
  std::size_t top = 20;
  int jobs = 0;
  bool json = false;
};

enum class State : std::uint8_t {
  kSame,
  kEqualValues,
  kWithin,  // differs, by no more than the tolerance
  kDiffers,
  kShape,
  kOnlyA,
  kOnlyB,
  kUnreadable
};

constexpr std::array<std::string_view, 8> kStates = {
    "same bytes",  "same values", "within tolerance", "differs",
    "other shape", "only in A",   "only in B",        "not readable"};

struct Comparison {
  std::string name;
  const Weight* a = nullptr;
  const Weight* b = nullptr;
  State state = State::kSame;
  double max_error = 0, mean_error = 0, relative = 0, snr_db = INFINITY, cosine = 1;
};

struct Sums {
  double aa = 0, bb = 0, ab = 0, error = 0, error_square = 0, largest = 0;
  bool nan_differs = false;
};

void add_piece(Sums& sums, const std::vector<float>& a, const std::vector<float>& b,
               std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    if (std::isnan(x) || std::isnan(y)) {
      sums.nan_differs |= std::isnan(x) != std::isnan(y);
      continue;
    }
    if (x == y) {  // also the same infinity
      if (!std::isinf(x)) {
        sums.aa += x * x;
        sums.bb += y * y;
        sums.ab += x * y;
      }
      continue;
    }
    const double error = std::fabs(x - y);
    sums.aa += x * x;
    sums.bb += y * y;
    sums.ab += x * y;
    sums.error += error;
    sums.error_square += error * error;
    sums.largest = std::max(sums.largest, error);
  }
}

bool same_bytes(const Weight& a, const Weight& b) {
  const bool is_transposed =
      (a.composed && a.composed->transposed) != (b.composed && b.composed->transposed);
  if (is_transposed || a.format != b.format || a.quant_method != b.quant_method) return false;
  if (a.parts.size() != b.parts.size() || a.shape != b.shape) return false;
  if (a.composed && a.parts.empty()) return false;  // of a GGUF file: by their values
  if (a.source || b.source) {
    return a.source && b.source && a.source->has_order_of(*b.source) &&
           std::ranges::equal(a.source->bytes(), b.source->bytes());
  }
  for (std::size_t i = 0; i < a.parts.size(); ++i) {
    const auto x = a.parts[i].tensor.bytes(), y = b.parts[i].tensor.bytes();
    if (x.size() != y.size()) return false;
    if (!x.empty() && std::memcmp(x.data(), y.data(), x.size()) != 0) return false;
  }
  return true;
}

void compare_values(Comparison& row) {
  constexpr std::uint64_t kStep = 1 << 20;
  std::vector<float> a(std::min(kStep, row.a->elements)), b(a.size());
  Sums sums;
  for (std::uint64_t begin = 0; begin < row.a->elements; begin += kStep) {
    const std::uint64_t end = std::min(begin + kStep, row.a->elements);
    read_elements(*row.a, begin, end, DType::kFloat32, a.data());
    read_elements(*row.b, begin, end, DType::kFloat32, b.data());
    add_piece(sums, a, b, end - begin);
    throw_if_interrupted();
  }
  const auto count = static_cast<double>(row.a->elements);
  if (sums.nan_differs) sums.largest = INFINITY;
  row.state = sums.largest == 0 ? State::kEqualValues : State::kDiffers;
  row.max_error = sums.largest;
  row.mean_error = count == 0 ? 0 : sums.error / count;
  if (sums.largest != 0) {
    const double relative = std::sqrt(sums.error_square / sums.aa);
    // A NaN or an infinity on one side: worse than any number, and sortable.
    row.relative = std::isfinite(relative) && !sums.nan_differs ? relative : INFINITY;
  }
  if (sums.error_square > 0) row.snr_db = 10 * std::log10(sums.aa / sums.error_square);
  if (sums.aa > 0 && sums.bb > 0) row.cosine = sums.ab / std::sqrt(sums.aa * sums.bb);
}

void compare(Comparison& row, double tolerance) {
  if (row.a == nullptr || row.b == nullptr) {
    row.state = row.a == nullptr ? State::kOnlyB : State::kOnlyA;
  } else if (row.a->shape != row.b->shape) {
    row.state = State::kShape;
  } else if (same_bytes(*row.a, *row.b)) {
    row.state = State::kSame;
  } else if (!row.a->is_readable() || !row.b->is_readable()) {
    row.state = State::kUnreadable;
  } else {
    compare_values(row);
    if (row.state == State::kDiffers && row.relative <= tolerance) row.state = State::kWithin;
  }
}

using Weights = std::vector<Weight>;

// The weights with these stacks of experts in the place of what they consist of.
Weights with_stacks(const Weights& weights, const std::map<std::string, Weight>& stacks) {
  std::set<std::string> members;
  Weights list;
  for (const auto& [name, stack] : stacks) {
    for (std::string& member : member_names(stack)) members.insert(std::move(member));
    list.push_back(stack);
  }
  for (const Weight& weight : weights) {
    if (!members.contains(weight.name)) list.push_back(weight);
  }
  std::sort(list.begin(), list.end(),
            [](const Weight& x, const Weight& y) { return x.name < y.name; });
  return list;
}

// Experts that the two store in different ways are compared as stacks.
std::pair<Weights, Weights> aligned(const Model& a, const Model& b) {
  std::map<std::string, Weight> of_a, of_b;
  const auto stacks = [](const Model& model) {
    return stack_experts(model.weights, model.config ? *model.config : json::Value::object())
        .stacks;
  };
  const std::vector<Weight> all_b = stacks(b);
  for (const Weight& stack : stacks(a)) {
    const auto other = std::find_if(all_b.begin(), all_b.end(),
                                    [&](const Weight& w) { return w.name == stack.name; });
    if (other == all_b.end()) continue;
    const auto is_transposed = [](const Weight& w) { return w.composed && w.composed->transposed; };
    const bool alike = member_names(stack) == member_names(*other) &&
                       is_transposed(stack) == is_transposed(*other);
    if (alike) continue;
    of_a.emplace(stack.name, stack);
    of_b.emplace(stack.name, *other);
  }
  return {with_stacks(a.weights, of_a), with_stacks(b.weights, of_b)};
}

std::vector<Comparison> pair_up(const Weights& a, const Weights& b,
                                const std::vector<Pattern>& filters) {
  std::vector<Comparison> rows;
  auto x = a.begin();
  auto y = b.begin();
  while (x != a.end() || y != b.end()) {
    Comparison row;
    const bool take_a = y == b.end() || (x != a.end() && x->name <= y->name);
    const bool take_b = x == a.end() || (y != b.end() && y->name <= x->name);
    row.name = take_a ? x->name : y->name;
    if (take_a) row.a = &*x++;
    if (take_b) row.b = &*y++;
    if (filters.empty() || any_matches(filters, row.name)) rows.push_back(row);
  }
  return rows;
}

bool is_mismatch(const Comparison& row) { return row.state >= State::kDiffers; }
bool has_numbers(const Comparison& row) {
  return row.state == State::kWithin || row.state == State::kDiffers;
}

// What has no number first, then by relative error.
bool worse(const Comparison& a, const Comparison& b) {
  const auto rank = [](const Comparison& row) {
    return row.state >= State::kShape ? 0 : has_numbers(row) ? 1 : 2;
  };
  if (rank(a) != rank(b)) return rank(a) < rank(b);
  return a.relative != b.relative ? a.relative > b.relative : a.name < b.name;
}

std::string scientific(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2e", value);
  return text.data();
}

json::Value row_json(const Comparison& row) {
  json::Value value;
  value.set("name", json::Value::string(row.name));
  value.set("state", json::Value::string(kStates[static_cast<std::size_t>(row.state)]));
  if (row.a) value.set("format_a", json::Value::string(row.a->format));
  if (row.b) value.set("format_b", json::Value::string(row.b->format));
  if (!has_numbers(row)) return value;
  value.set("max_error", json::Value::number(row.max_error));
  value.set("mean_error", json::Value::number(row.mean_error));
  value.set("relative_error", json::Value::number(row.relative));
  value.set("snr_db", json::Value::number(row.snr_db));
  value.set("cosine", json::Value::number(row.cosine));
  return value;
}

void print_text(const std::vector<Comparison>& rows, const Options& options) {
  Table table({"weight", "state", "A", "B", ">max error", ">mean error", ">relative", ">SNR dB",
               ">cosine"});
  std::array<std::size_t, kStates.size()> counts{};
  for (const Comparison& row : rows) {
    ++counts[static_cast<std::size_t>(row.state)];
  }
  std::size_t left = options.top;
  for (const Comparison& row : rows) {
    if (row.state == State::kSame || row.state == State::kEqualValues) break;
    if (left-- == 0) break;
    const bool numbers = has_numbers(row);
    const auto cell = [&](const std::string& text) { return numbers ? text : std::string("-"); };
    table.add({printable(row.name), std::string(kStates[static_cast<std::size_t>(row.state)]),
               row.a ? std::string(row.a->format) : "-", row.b ? std::string(row.b->format) : "-",
               cell(scientific(row.max_error)), cell(scientific(row.mean_error)),
               cell(scientific(row.relative)), cell(fixed_text(row.snr_db, 1)),
               cell(fixed_text(row.cosine, 6))});
  }
  if (!table.empty()) std::printf("%s\n", table.text().c_str());
  std::string summary;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    summary +=
        (summary.empty() ? "" : ", ") + std::to_string(counts[i]) + " " + std::string(kStates[i]);
  }
  std::printf("%zu weights: %s\n", rows.size(), summary.empty() ? "none" : summary.c_str());
  if (options.tolerance == 0 || std::any_of(rows.begin(), rows.end(), is_mismatch)) return;
  const double worst = rows.empty() ? 0 : rows.front().relative;
  std::printf("no mismatch: the largest relative error is %s, --tolerance is %g\n",
              scientific(worst).c_str(), options.tolerance);
}

int diff(const Options& options, const Session& session) {
  const bool gguf_a = is_gguf(options.a), gguf_b = is_gguf(options.b);
  const auto names =
      gguf_a && gguf_b ? gguf::TensorNames::kOfFile : gguf::TensorNames::kOfTransformers;
  const Model a = gguf_a ? open_gguf_model(options.a, names) : open_model(options.a);
  const Model b = gguf_b ? open_gguf_model(options.b, names) : open_model(options.b);
  refuse_transforms(a);
  refuse_transforms(b);
  const auto [weights_a, weights_b] = aligned(a, b);
  std::vector<Comparison> rows = pair_up(weights_a, weights_b, patterns(options.names));
  if (rows.empty() && !options.names.empty()) {
    throw UsageError("--name", printable(options.names.front()) +
                                   (options.names.size() > 1 ? " and the others" : "") +
                                   ": no weight has such a name");
  }
  {
    const auto advance = session.progress("diff", a.size_bytes());
    std::atomic<std::size_t> next = 0;
    const int threads = threads_of(options.jobs);
    ThreadPool pool(threads);
    pool.parallel_for(static_cast<std::size_t>(threads), 1, [&](std::size_t, std::size_t) {
      for (std::size_t i = next++; i < rows.size(); i = next++) {
        compare(rows[i], options.tolerance);
        advance(rows[i].a ? rows[i].a->size_bytes : 0);
      }
    });
  }
  std::sort(rows.begin(), rows.end(), worse);
  const auto mismatches = std::count_if(rows.begin(), rows.end(), is_mismatch);
  if (options.json) {
    json::Value value;
    value.set("schema_version", json::Value::number(std::int64_t{1}));
    value.set("a", json::Value::string(options.a));
    value.set("b", json::Value::string(options.b));
    value.set("tolerance", json::Value::number(options.tolerance));
    value.set("mismatches", json::Value::number(std::int64_t{mismatches}));
    json::Value& list = value.set("weights", json::Value::array());
    for (const Comparison& row : rows) list.append(row_json(row));
    std::fputs(json::dump(value).c_str(), stdout);
  } else {
    print_text(rows, options);
    if (mismatches != 0) {
      const std::string both = shell_word(options.a) + " " + shell_word(options.b);
      say_next(session, "every weight, not the worst " + std::to_string(options.top) +
                            ": monograph diff " + both + " --json");
    }
  }
  return mismatches == 0 ? kOk : kMismatch;
}

Run declare(CommandLine& line) {
  auto options = std::make_shared<Options>();
  line.add_option("a", options->a,
                  "One model: a folder, a .safetensors file, an index or a GGUF file")
      .required();
  line.add_option("b", options->b, "The other").required();
  line.add_option("--name", options->names,
                  "Only weights whose name matches this regex (repeatable)")
      .type_name("REGEX")
      .repeatable();
  line.add_option("--tolerance", options->tolerance,
                  "Largest relative error |A - B| / |A| that is no mismatch")
      .finite(0)
      .option_text("X [0]");
  line.add_option("--top", options->top, "Print this many weights, the worst first")
      .option_text("N [20]");
  declare_jobs(line, options->jobs);
  line.add_flag("--json", options->json, "Print JSON, with all weights");
  return [options](Session& session) { return diff(*options, session); };
}

}  // namespace

const Command kDiff = {
    "diff",
    "how two checkpoints differ, weight by weight, across formats",
    "Compare the weights of two checkpoints by name. Packed weights are decoded, so a quantised "
    "model "
    "can be compared with its original. For each weight: largest and mean error, relative error "
    "|A - B| / |A|, signal-to-noise ratio and cosine; the worst first.\n\n"
    "A GGUF file is compared with a folder under the names of transformers and in its order of "
    "rows, and with another GGUF file under the names of the files.\n\n"
    "Exit code 0 if every weight has the same values or is within --tolerance, 4 if one differs by "
    "more, has another shape or is on one side only.",
    "monograph diff my-llama my-llama-nf4\n"
    "monograph diff before after --name 'layers\\.0\\.' --top 5\n"
    "monograph diff my-llama my-llama-nf4 --tolerance 0.12 --json\n"
    "monograph diff my-llama my-llama-Q4_K_M.gguf --tolerance 0.1",
    declare,
};

}  // namespace monograph::cli
