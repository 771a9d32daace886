// The one way a kernel sees a packed weight: non-owning, unaligned, checked by whoever made it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/format.h"

namespace monograph {

// Scales of a blockwise format as they lie in the checkpoint. Plain: `blocks` holds one fp32 a
// block. Double-quantised: `blocks` holds one code a block, and
//   scale[i] = map[blocks[i]] * groups[i / 256] + offset      (two roundings to fp32, never fused).
struct ScalesView {
  const std::uint8_t* blocks = nullptr;
  const std::uint8_t* groups =
      nullptr;                        // fp32, one for 256 blocks; nullptr if not double-quantised
  const std::uint8_t* map = nullptr;  // fp32 [256]
  float offset = 0.0f;

  bool double_quantised() const { return groups != nullptr; }
};
inline constexpr std::size_t kScaleGroup = 256;

// rows x cols elements, row-major. A 3-D weight [E, rows, cols] is a view of E * rows rows.
struct PackedView {
  Format format = Format::kPlain;
  std::size_t rows = 0, cols = 0;
  std::size_t block = 0;
  const std::uint8_t* values = nullptr;
  ScalesView scales;

  std::size_t elements() const { return rows * cols; }
};

}  // namespace monograph
