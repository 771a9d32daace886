#include "monograph/formats/zero_points.h"

#include <algorithm>

namespace monograph {

void store_zero_points(const FormatInfo& info, std::size_t rows, std::size_t groups,
                       const std::uint8_t* zeros, std::uint8_t* out) {
  if (info.zero_points != ZeroPoints::kPacked) {
    std::copy_n(zeros, rows * groups, out);
    return;
  }
  const auto bits = static_cast<std::size_t>(info.bits);
  const std::size_t per_word = 32 / bits;
  const unsigned half = 1u << (bits - 1), mask = 2 * half - 1;
  std::fill_n(out, zero_point_bytes(info, rows, groups), std::uint8_t{0});
  for (std::size_t row = 0; row < rows; ++row) {
    const std::size_t place = row % per_word * bits;
    for (std::size_t group = 0; group < groups; ++group) {
      const unsigned field = (zeros[row * groups + group] + half) & mask;
      std::uint8_t& byte = out[(row / per_word * groups + group) * 4 + place / 8];
      byte = static_cast<std::uint8_t>(byte | field << place % 8);
    }
  }
}

}  // namespace monograph
