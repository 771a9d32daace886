#include "monograph/merge/packed.h"

#include <algorithm>
#include <vector>

#include "monograph/convert/packed_parts.h"
#include "monograph/merge/packed_copy.h"
#include "monograph/merge/panels.h"

namespace monograph {
namespace {

// body(first row, base, merged) for each panel.
template <class Body>
void each_panel(const MergedPanels& panels, ParallelFor parallel_for, Body&& body) {
  parallel_for(panels.panels(), 1, [&](std::size_t panel, std::size_t end) {
    std::vector<float> base;
    std::vector<double> merged;
    for (; panel < end; ++panel) {
      const std::size_t first = panel * panels.panel_rows();
      const std::size_t last = std::min(panels.rows(), first + panels.panel_rows());
      panels.read_base(first, last, base);
      panels.merge(first, last, base, merged);
      body(first, base, merged);
    }
  });
}

Survival measure(const MergedPanels& panels, const PackedCopy& copy, DType type,
                 ParallelFor parallel_for) {
  std::vector<Survival> survivals(panels.panels());
  each_panel(
      panels, parallel_for,
      [&](std::size_t first, const std::vector<float>& base, const std::vector<double>& merged) {
        const std::size_t cols = panels.cols();
        std::vector<float> row(cols);
        Survival& survival = survivals[first / panels.panel_rows()];
        for (std::size_t i = 0; i < merged.size(); ++i) {
          if (i % cols == 0) {
            copy.read_row(first + i / cols, type, row.data());
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

float largest_merged(const MergedPanels& panels, ParallelFor parallel_for) {
  std::vector<float> largest(panels.panels());
  each_panel(panels, parallel_for,
             [&](std::size_t first, const std::vector<float>&, const std::vector<double>& merged) {
               const std::vector<float> rounded(merged.begin(), merged.end());
               largest[first / panels.panel_rows()] =
                   largest_magnitude(DType::kFloat32, rounded.data(), rounded.size());
             });
  return largest.empty() ? 0.0f : *std::max_element(largest.begin(), largest.end());
}

}  // namespace

Survival merge_packed(const MergedWeight& weight, safetensors::ShardedWriter& writer,
                      ParallelFor parallel_for, FunctionRef<void(std::uint64_t)> done) {
  const Conversion& conversion = *weight.packed;
  const MergedPanels panels(weight, parallel_for, PackedLayout(conversion).unit());
  PackedCopy copy(conversion, 1, panels.rows(), panels.cols());
  if (copy.wants_largest()) copy.set_largest(0, largest_merged(panels, parallel_for));
  each_panel(panels, parallel_for,
             [&](std::size_t first, const std::vector<float>&, const std::vector<double>& merged) {
               const std::vector<float> rounded(merged.begin(), merged.end());
               copy.quantize(first * panels.cols(), DType::kFloat32, rounded.data(),
                             rounded.size());
             });
  writer.write(values_name(conversion), 0, copy.values());
  write_packed_parts(conversion, copy.scales(), writer);
  std::uint64_t bytes = 0;
  for (const auto& spec : specs_of(conversion)) bytes += size_bytes(spec);
  done(bytes);
  if (!weight.is_changed()) return {};
  copy.finish(parallel_for);
  return measure(panels, copy, source_dtype(*weight.base), parallel_for);
}

}  // namespace monograph
