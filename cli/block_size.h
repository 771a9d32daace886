// --block-size, --asymmetric and --double-quant, which only some formats have.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "monograph/formats/format.h"

namespace monograph::cli {

// The one given, else 64 where the format has a choice and its only one where it has none; of int4
// 128, of int8 and fp8 0, the row. Throws UsageError if the format has no such block. Options that
// say how a base was loaded begin with --as-.
std::size_t block_size(Format format, std::optional<std::size_t> given,
                       const std::string& dashes = "--");

// --asymmetric: zero points, which integers have. Throws UsageError if the format has none.
ScaleRule zero_point_rule(Format format, bool asymmetric, const std::string& dashes = "--");

// Throws UsageError if double quantisation is wanted of a format without it.
void check_double_quant(Format format, bool wanted, const std::string& dashes = "--");

}  // namespace monograph::cli
