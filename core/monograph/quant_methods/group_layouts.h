// Integers and E4M3 with scales of rows, of groups of them or of the whole weight: as
// shared_layouts.h.
#pragma once

#include "monograph/quant_methods/candidate.h"

namespace monograph {

// Codes in words of 32 bits along the rows, "shape" the logical one, "scale" for groups of a row or
// rows, "zero_point" packed along the rows: int4 or int8, told by the length of a row. Other widths
// and columns in another order by "g_idx" are recognised and not decoded. "columns" says which
// column of the weight each stored one is; a folder with them has quant_method "monograph", and
// each of its weights has them.
void describe_packed_integers(const Candidate& found);

// A signed byte an element, "scale" for groups of a row, rows or the whole weight, "zero_point" of
// its shape.
void describe_int8(const Candidate& found);

// Binds E4M3 elements [rows, cols] with a "scale" for each row, or one; shape and block are set.
void bind_fp8_rows(const Candidate& found);

}  // namespace monograph
