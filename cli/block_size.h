// --block-size and --double-quant, which only some formats have.
#pragma once

#include <cstddef>
#include <optional>

#include "monograph/formats/format.h"

namespace monograph::cli {

// The one given, else 64 where the format has a choice and its only one where it has none. Throws
// UsageError if the format has no such block.
std::size_t block_size(Format format, std::optional<std::size_t> given);

// Throws UsageError if double quantisation is wanted of a format without it.
void check_double_quant(Format format, bool wanted);

}  // namespace monograph::cli
