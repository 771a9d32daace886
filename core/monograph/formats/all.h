// Every packed format as a type. Kernels are templates over a format; this list is what they are
// instantiated for.
#pragma once

#include "monograph/formats/fp4.h"
#include "monograph/formats/fp8_block.h"
#include "monograph/formats/mxfp4.h"
#include "monograph/formats/mxfp8.h"
#include "monograph/formats/nf4.h"
#include "monograph/formats/nvfp4.h"

namespace monograph {

template <class... Fs>
struct FormatList {};

using PackedFormats = FormatList<Nf4, Fp4, Mxfp4, Mxfp8, Nvfp4, Fp8Block>;

}  // namespace monograph
