#include "monograph/merge/merge.h"

#include <algorithm>

#include "monograph/merge/measure.h"
#include "monograph/merge/packed.h"
#include "monograph/merge/panels.h"
#include "monograph/merge/round.h"
#include "monograph/quant_methods/packed_parts.h"

namespace monograph {
namespace {

// How much of an unchanged weight is copied at once.
constexpr std::uint64_t kCopyBytes = std::uint64_t{4} << 20;

class Runner {
 public:
  Runner(safetensors::ShardedWriter& writer, ParallelFor parallel_for,
         FunctionRef<void(std::uint64_t)> done)
      : writer_(writer), parallel_for_(parallel_for), done_(done) {}

  void copy(const MergedWeight& weight) {
    const std::span<const std::uint8_t> bytes = weight.base->parts.front().tensor.bytes();
    const std::size_t pieces = (bytes.size() + kCopyBytes - 1) / kCopyBytes;
    parallel_for_(pieces, 1, [&](std::size_t piece, std::size_t end) {
      for (; piece < end; ++piece) {
        const std::uint64_t at = piece * kCopyBytes;
        const auto part = bytes.subspan(at, std::min<std::uint64_t>(kCopyBytes, bytes.size() - at));
        writer_.write(weight.name, at, part);
        done_(part.size());
      }
    });
  }

  Survival merge(const MergedWeight& weight) {
    return with_type(*weight.dtype, [&]<class T>() { return merge_to<T>(weight); });
  }

 private:
  template <class T>
  Survival merge_to(const MergedWeight& weight) {
    Survival whole;
    for (const ExpertRange& range : merged_ranges(weight)) whole += merge_range<T>(weight, range);
    return whole;
  }

  template <class T>
  Survival merge_range(const MergedWeight& weight, ExpertRange range) {
    const MergedPanels panels(weight, range, parallel_for_);
    Survival whole;
    for (std::size_t matrix = 0; matrix < panels.matrices(); ++matrix) {
      whole += merge_matrix<T>(weight, panels, matrix);
    }
    return whole;
  }

  template <class T>
  Survival merge_matrix(const MergedWeight& weight, const MergedPanels& panels,
                        std::size_t matrix) {
    const Measure measure(weight, panels, matrix, parallel_for_);
    const std::size_t count = panels.panels_of_matrix();
    std::vector<Survival> survivals(count);
    parallel_for_(count, 1, [&](std::size_t index, std::size_t end) {
      std::vector<float> base;
      std::vector<double> merged;
      std::vector<T> out;
      std::vector<float> read_back;
      for (; index < end; ++index) {
        const std::size_t panel = matrix * count + index;
        const std::size_t first = panels.first_row(panel), last = panels.last_row(panel);
        panels.read_base(first, last, base);
        panels.merge(first, last, base, merged);
        out.resize(merged.size());
        for (std::size_t i = 0; i < merged.size(); ++i) out[i] = round_to<T>(merged[i]);
        read_back.resize(out.size());
        for (std::size_t i = 0; i < merged.size(); ++i) read_back[i] = to_float(out[i]);
        panels.check_stored(first, short_name(stored(*weight.dtype)), merged, read_back);
        if (weight.is_changed()) {
          survivals[index] = measure(first % panels.matrix_rows(), base, merged, read_back);
        }
        const std::size_t bytes = out.size() * sizeof(T);
        const bool apart = !weight.members.empty();
        const std::size_t of_weight = panels.matrix_of(panel);
        const std::size_t row = apart ? first - of_weight * panels.matrix_rows() : first;
        writer_.write(apart ? weight.members[of_weight] : weight.name,
                      std::uint64_t{row} * panels.cols() * sizeof(T),
                      {reinterpret_cast<const std::uint8_t*>(out.data()), bytes});
        done_(bytes);
      }
    });
    Survival whole;
    for (const Survival& survival : survivals) whole += survival;
    return whole;
  }

  safetensors::ShardedWriter& writer_;
  ParallelFor parallel_for_;
  FunctionRef<void(std::uint64_t)> done_;
};

}  // namespace

std::vector<MergeRow> run_merge(const MergePlan& plan, safetensors::ShardedWriter& writer,
                                ParallelFor parallel_for, FunctionRef<void(std::uint64_t)> done) {
  Runner runner(writer, parallel_for, done);
  std::vector<MergeRow> rows;
  for (const MergedWeight& weight : plan.weights) {
    if (!weight.dtype && !weight.packed) {
      runner.copy(weight);
      continue;
    }
    const Survival survival =
        weight.packed ? merge_packed(weight, writer, parallel_for, done) : runner.merge(weight);
    if (!weight.is_changed()) continue;
    const std::string format(weight.packed ? written_name(weight.packed->format)
                                           : short_name(stored(*weight.dtype)));
    rows.push_back({weight.name, weight.change(), format, survival});
  }
  return rows;
}

}  // namespace monograph
