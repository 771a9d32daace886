// How a GPU's product of many rows is cut: panels of a packed weight, decoded one at a time into
// scratch memory and multiplied by the library of the device, and chunks of tokens whose logits
// exist at a time. Formulas of sizes alone: what an operator allocates, a test can compute.
#pragma once

#include <cstddef>

namespace monograph::gpu {

// Dense bytes of one panel. The whole weight is one panel where it is no larger.
inline constexpr std::size_t kPanelBytes = std::size_t{64} << 20;
// Panels are cut at multiples of this, the tile of the products.
inline constexpr std::size_t kPanelStep = 128;

// A weight is cut along one side: its rows for x W^T, its columns for dy W, so that every sum runs
// over the whole of the other side and is rounded once.
struct PanelCut {
  std::size_t extent = 0;  // of the side that is cut
  std::size_t across = 0;  // of the other side
  std::size_t size = 0;    // of each panel but the last
  std::size_t count = 0;

  std::size_t begin(std::size_t i) const { return i * size; }
  std::size_t end(std::size_t i) const { return i + 1 < count ? (i + 1) * size : extent; }
  // Elements of the largest panel: the scratch of the whole product.
  std::size_t scratch_elements() const { return size * across; }
};

// The fewest panels of at most max(panel_bytes, kPanelStep * across * element_bytes), of even
// sizes; none for an extent of 0. Scratch bytes are never more than that, nor than the dense
// weight.
PanelCut cut_panels(std::size_t extent, std::size_t across, std::size_t element_bytes,
                    std::size_t panel_bytes = kPanelBytes);

// Logits that exist at a time: of so many tokens, fewer if they take more than kLogitsBytes, but
// one.
inline constexpr std::size_t kChunkTokens = 2048;
inline constexpr std::size_t kLogitsBytes = std::size_t{256} << 20;
std::size_t chunk_tokens(std::size_t tokens, std::size_t vocabulary, std::size_t element_bytes,
                         std::size_t logits_bytes = kLogitsBytes);

}  // namespace monograph::gpu
