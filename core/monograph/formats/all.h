// Every packed format as a type. Kernels are templates over a format; these lists are what they are
// instantiated for: all of them for `PackedFormats`, `dequantize` alone for `RowFormats` and
// `InterleavedFormats`, whose rows other kernels decode through a function pointer. Nothing
// quantises to the last.
#pragma once

#include "monograph/formats/fp4.h"
#include "monograph/formats/fp8_block.h"
#include "monograph/formats/fp8_row.h"
#include "monograph/formats/ggml_blocks.h"
#include "monograph/formats/ggml_superblocks.h"
#include "monograph/formats/int4.h"
#include "monograph/formats/int8.h"
#include "monograph/formats/mxfp4.h"
#include "monograph/formats/mxfp8.h"
#include "monograph/formats/nf4.h"
#include "monograph/formats/nvfp4.h"

namespace monograph {

template <class... Fs>
struct FormatList {};

using PackedFormats = FormatList<Nf4, Fp4, Mxfp4, Mxfp8, Nvfp4, Fp8Block>;
using RowFormats = FormatList<Int4, Int8, Fp8Row>;
using InterleavedFormats =
    FormatList<Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Iq4Nl, Q4K, Q5K, Q6K, Iq4Xs, GgmlMxfp4>;

template <class... Fs>
constexpr bool in_list(FormatList<Fs...>, Format format) {
  return ((format == Fs::kFormat) || ...);
}

// Whether products decode its rows through a pointer.
constexpr bool decoded_by_rows(Format format) {
  return in_list(RowFormats{}, format) || in_list(InterleavedFormats{}, format);
}

}  // namespace monograph
