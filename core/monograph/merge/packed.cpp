#include "monograph/merge/packed.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "monograph/merge/measure.h"
#include "monograph/merge/packed_copy.h"
#include "monograph/merge/panels.h"
#include "monograph/quant_methods/packed_parts.h"

namespace monograph {
namespace {

// body(panel, base, merged) for panels [begin, end).
template <class Body>
void each_panel(const MergedPanels& panels, std::size_t begin, std::size_t end,
                ParallelFor parallel_for, Body&& body) {
  parallel_for(end - begin, 1, [&](std::size_t index, std::size_t last_index) {
    std::vector<float> base;
    std::vector<double> merged;
    for (; index < last_index; ++index) {
      const std::size_t panel = begin + index;
      const std::size_t first = panels.first_row(panel), last = panels.last_row(panel);
      panels.read_base(first, last, base);
      panels.merge(first, last, base, merged);
      body(panel, base, merged);
    }
  });
}

// The packing of the base where its scales are kept: groups of a row in a base of the same packing
// would come to lie between the steps of scales of their own. What replaces the base has none.
const PackedView* grid_of_base(const MergedWeight& weight, const MergedPanels& panels,
                               const PackedCopy& copy) {
  const PackedCopy* made = panels.packed_base();
  if ((made == nullptr && !weight.base->view) || weight.replacement != nullptr) return nullptr;
  if (made == nullptr && !weight.base->columns.empty()) return nullptr;  // other groups
  const PackedView* grid = made != nullptr ? &made->view() : &*weight.base->view;
  return copy.has_packing_of(*grid) ? grid : nullptr;
}

// Of one matrix of the range: rounds it anew if there is something to round it along, or if its
// codes are not those of its scales yet, and measures what the stored values keep. `copy` is
// finished; `inputs` may be null.
Survival finish_matrix(const MergedWeight& weight, const MergedPanels& panels, std::size_t matrix,
                       const InputMoments* inputs, bool kept_scales, PackedCopy& copy,
                       ParallelFor parallel_for) {
  const Measure measure(weight, panels, matrix, parallel_for);
  const DType type = source_dtype(*weight.base);
  const std::size_t count = panels.panels_of_matrix(), cols = panels.cols();
  if (count == 0) return {};
  const bool feeds_back = inputs != nullptr || (weight.rounding != Rounding::kNearest &&
                                                measure.directions().count() != 0);
  const FeedbackRows feedback =
      feeds_back ? feedback_along(measure.directions(), inputs) : FeedbackRows{cols, 0, {}, {}};
  std::vector<Survival> survivals(count);
  const std::size_t begin = matrix * count, before = panels.first_row(0);
  each_panel(panels, begin, begin + count, parallel_for,
             [&](std::size_t panel, const std::vector<float>& base, std::vector<double>& merged) {
               const std::size_t first = panels.first_row(panel), rows = merged.size() / cols;
               const std::size_t row = first - before;
               if (feeds_back || kept_scales) {
                 std::vector<std::uint8_t> codes(merged.size());
                 round_with_feedback(copy.view(), row, rows, type, feedback, merged.data(),
                                     codes.data());
                 copy.set_codes(row * cols, codes);
               }
               std::vector<float> stored_values(merged.size());
               for (std::size_t i = 0; i < rows; ++i) {
                 copy.read(row + i, 0, cols, type, stored_values.data() + i * cols);
               }
               panels.check_stored(first, short_name(stored(type)), merged, stored_values);
               if (weight.is_changed()) {
                 survivals[panel - begin] =
                     measure(row % panels.matrix_rows(), base, merged, stored_values);
               }
             });
  Survival whole;
  for (const Survival& survival : survivals) whole += survival;
  return whole;
}

void set_largest(const MergedPanels& panels, PackedCopy& copy, ParallelFor parallel_for) {
  std::vector<float> largest(panels.panels());
  each_panel(panels, 0, panels.panels(), parallel_for,
             [&](std::size_t panel, const std::vector<float>&, const std::vector<double>& merged) {
               const std::vector<float> rounded(merged.begin(), merged.end());
               largest[panel] = largest_magnitude(DType::kFloat32, rounded.data(), rounded.size());
             });
  std::vector<float> of_matrix(copy.layout().matrices());
  for (std::size_t panel = 0; panel < largest.size(); ++panel) {
    float& found = of_matrix[panels.matrix_of(panel) - panels.matrix_of(0)];
    found = std::max(found, largest[panel]);
  }
  for (std::size_t i = 0; i < of_matrix.size(); ++i) copy.set_largest(i, of_matrix[i]);
}

// To the nearest; groups keep the scales of `grid`, if it is not null. `before` are the rows before
// those of `copy`.
void quantize_panels(const MergedPanels& panels, std::size_t before, const PackedView* grid,
                     PackedCopy& copy, ParallelFor parallel_for) {
  each_panel(
      panels, 0, panels.panels(), parallel_for,
      [&](std::size_t panel, const std::vector<float>& base, const std::vector<double>& merged) {
        const std::vector<float> rounded(merged.begin(), merged.end());
        const std::size_t row = panels.first_row(panel) - before;
        copy.quantize(row * panels.cols(), DType::kFloat32, rounded.data(), rounded.size());
        if (grid != nullptr) copy.keep_scales(*grid, row, base, merged);
      });
}

}  // namespace

Survival merge_packed(const MergedWeight& weight, safetensors::ShardedWriter& writer,
                      ParallelFor parallel_for, FunctionRef<void(std::uint64_t)> done) {
  const Conversion& conversion = *weight.packed;
  const PackedLayout layout(conversion);
  PackedScales scales;
  scales.make_room(layout);
  std::optional<InputMoments> inputs;
  if (weight.inputs != nullptr) inputs = weight.inputs->moments();
  Survival whole;
  for (const ExpertRange& range : merged_ranges(weight)) {
    const std::size_t rows = weight.rounding == Rounding::kNearest ? 1 : kFeedbackLanes;
    const MergedPanels panels(weight, range, parallel_for, layout.unit(), rows);
    const std::size_t cols = panels.cols();
    PackedCopy copy(conversion, std::max<std::size_t>(range.count, 1), panels.matrix_rows(), cols);
    const std::size_t before = range.first * panels.matrix_rows() * cols;
    const PackedView* grid = grid_of_base(weight, panels, copy);
    if (grid != nullptr && !weight.is_changed()) {
      copy.take(*grid);
    } else {
      if (copy.wants_largest()) set_largest(panels, copy, parallel_for);
      quantize_panels(panels, range.first * panels.matrix_rows(), grid, copy, parallel_for);
    }
    if (weight.is_changed() || (weight.inputs != nullptr && grid == nullptr)) {
      copy.finish(parallel_for);
      for (std::size_t matrix = 0; matrix < panels.matrices(); ++matrix) {
        whole += finish_matrix(weight, panels, matrix, inputs ? &*inputs : nullptr, grid != nullptr,
                               copy, parallel_for);
      }
    }
    writer.write(values_name(conversion), layout.value_bytes(before), copy.values());
    done(copy.values().size());
    const std::size_t bytes = copy.layout().blocks() * layout.scale_bytes();
    if (bytes != 0) {
      std::memcpy(scales.at(layout, layout.block_at(before)), copy.scales().words.data(), bytes);
    }
    std::copy(copy.scales().zeros.begin(), copy.scales().zeros.end(),
              scales.zeros.begin() + static_cast<long>(layout.block_at(before)));
    // A format whose blocks know no matrices has no scales of them either.
    const auto& tensors = copy.scales().tensors;
    if (copy.wants_largest()) {
      std::copy(tensors.begin(), tensors.end(),
                scales.tensors.begin() + static_cast<long>(range.first));
    }
  }
  write_packed_parts(conversion, scales, writer);
  std::uint64_t rest = 0;
  for (const auto& spec : specs_of(conversion)) rest += size_bytes(spec);
  done(rest - layout.value_bytes(layout.elements()));
  return whole;
}

void quantize_calibrated(const Conversion& conversion, const CalibratedInputs& inputs,
                         safetensors::ShardedWriter& writer, ParallelFor parallel_for) {
  const Weight& weight = *conversion.weight;
  MergedWeight unchanged;
  unchanged.name = weight.name;
  unchanged.shape = weight.shape;
  unchanged.base = &weight;
  unchanged.experts = conversion.stack == Stack::kNone ? 0 : weight.shape.front();
  unchanged.packed = conversion;
  unchanged.rounding = Rounding::kCalibrated;
  unchanged.inputs = &inputs;
  merge_packed(unchanged, writer, parallel_for, [](std::uint64_t) {});
}

}  // namespace monograph
