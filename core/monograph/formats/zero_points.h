// The zero points of groups as they are stored.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/formats/format.h"

namespace monograph {

// From a signed byte for each group of `rows` rows to zero_point_bytes(info, rows, groups) bytes;
// fields that no row has become 0.
void store_zero_points(const FormatInfo& info, std::size_t rows, std::size_t groups,
                       const std::uint8_t* zeros, std::uint8_t* out);

}  // namespace monograph
