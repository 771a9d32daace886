#include "monograph/merge/packed.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "monograph/convert/packed_parts.h"
#include "monograph/merge/packed_copy.h"
#include "monograph/merge/panels.h"

namespace monograph {
namespace {

// body(panel, base, merged) for each panel.
template <class Body>
void each_panel(const MergedPanels& panels, ParallelFor parallel_for, Body&& body) {
  parallel_for(panels.panels(), 1, [&](std::size_t panel, std::size_t end) {
    std::vector<float> base;
    std::vector<double> merged;
    for (; panel < end; ++panel) {
      const std::size_t first = panels.first_row(panel), last = panels.last_row(panel);
      panels.read_base(first, last, base);
      panels.merge(first, last, base, merged);
      body(panel, base, merged);
    }
  });
}

Survival measure(const MergedPanels& panels, const PackedCopy& copy, DType type,
                 ParallelFor parallel_for) {
  std::vector<Survival> survivals(panels.panels());
  const std::size_t before = panels.panels() == 0 ? 0 : panels.first_row(0);
  each_panel(
      panels, parallel_for,
      [&](std::size_t panel, const std::vector<float>& base, const std::vector<double>& merged) {
        const std::size_t cols = panels.cols(), first = panels.first_row(panel);
        std::vector<float> row(cols);
        Survival& survival = survivals[panel];
        for (std::size_t i = 0; i < merged.size(); ++i) {
          if (i % cols == 0) {
            copy.read(first - before + i / cols, 0, cols, type, row.data());
            panels.check_stored(first + i / cols, short_name(stored(type)),
                                std::span(merged).subspan(i, cols), row);
          }
          survival.add(base[i], merged[i], row[i % cols]);
        }
      });
  Survival whole;
  for (const Survival& survival : survivals) whole += survival;
  return whole;
}

void set_largest(const MergedPanels& panels, PackedCopy& copy, ParallelFor parallel_for) {
  std::vector<float> largest(panels.panels());
  each_panel(panels, parallel_for,
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

}  // namespace

Survival merge_packed(const MergedWeight& weight, safetensors::ShardedWriter& writer,
                      ParallelFor parallel_for, FunctionRef<void(std::uint64_t)> done) {
  const Conversion& conversion = *weight.packed;
  const PackedLayout layout(conversion);
  PackedScales scales;
  scales.make_room(layout);
  Survival whole;
  for (const ExpertRange& range : merged_ranges(weight)) {
    const MergedPanels panels(weight, range, parallel_for, layout.unit());
    const std::size_t cols = panels.cols();
    PackedCopy copy(conversion, std::max<std::size_t>(range.count, 1), panels.matrix_rows(), cols);
    const std::size_t before = range.first * panels.matrix_rows() * cols;
    if (copy.wants_largest()) set_largest(panels, copy, parallel_for);
    each_panel(
        panels, parallel_for,
        [&](std::size_t panel, const std::vector<float>&, const std::vector<double>& merged) {
          const std::vector<float> rounded(merged.begin(), merged.end());
          copy.quantize(panels.first_row(panel) * cols - before, DType::kFloat32, rounded.data(),
                        rounded.size());
        });
    writer.write(values_name(conversion), layout.value_bytes(before), copy.values());
    done(copy.values().size());
    const std::size_t bytes = copy.layout().blocks() * layout.scale_bytes();
    if (bytes != 0) {
      std::memcpy(scales.at(layout, layout.block_at(before)), copy.scales().words.data(), bytes);
    }
    // A format whose blocks know no matrices has no scales of them either.
    const auto& tensors = copy.scales().tensors;
    if (copy.wants_largest()) {
      std::copy(tensors.begin(), tensors.end(),
                scales.tensors.begin() + static_cast<long>(range.first));
    }
    if (!weight.is_changed()) continue;
    copy.finish(parallel_for);
    whole += measure(panels, copy, source_dtype(*weight.base), parallel_for);
  }
  write_packed_parts(conversion, scales, writer);
  std::uint64_t rest = 0;
  for (const auto& spec : specs_of(conversion)) rest += size_bytes(spec);
  done(rest - layout.value_bytes(layout.elements()));
  return whole;
}

}  // namespace monograph
