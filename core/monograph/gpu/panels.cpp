#include "monograph/gpu/panels.h"

#include <algorithm>

namespace monograph::gpu {
namespace {

std::size_t ceil_div(std::size_t a, std::size_t b) { return a / b + (a % b != 0); }

}  // namespace

PanelCut cut_panels(std::size_t extent, std::size_t across, std::size_t element_bytes,
                    std::size_t panel_bytes) {
  if (extent == 0) return {};
  if (across == 0) return {extent, 0, extent, 1};
  const std::size_t most = panel_bytes / element_bytes / across;
  if (most >= extent) return {extent, across, extent, 1};
  const std::size_t largest = std::max(most / kPanelStep * kPanelStep, kPanelStep);
  const std::size_t even = ceil_div(extent, ceil_div(extent, largest));
  const std::size_t size = std::min(ceil_div(even, kPanelStep) * kPanelStep, extent);
  return {extent, across, size, ceil_div(extent, size)};
}

std::size_t chunk_tokens(std::size_t tokens, std::size_t vocabulary, std::size_t element_bytes,
                         std::size_t logits_bytes) {
  const std::size_t row = std::max(vocabulary, std::size_t{1}) * element_bytes;
  return std::min({tokens, kChunkTokens, std::max(logits_bytes / row, std::size_t{1})});
}

}  // namespace monograph::gpu
