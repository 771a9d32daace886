// Two 4-bit codes a byte: where the even element lies.
#pragma once

#include <cstdint>

namespace monograph {

enum class Nibbles : std::uint8_t { kHighFirst, kLowFirst };

}  // namespace monograph
