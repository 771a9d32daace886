// Every packed format as a type. Kernels are templates over a format; this list is what they are
// instantiated for.
#pragma once

#include "formats/fp4.h"
#include "formats/fp8_block.h"
#include "formats/mxfp4.h"
#include "formats/mxfp8.h"
#include "formats/nf4.h"
#include "formats/nvfp4.h"

namespace monograph {

template <class... Fs>
struct FormatList {};

using PackedFormats = FormatList<Nf4, Fp4, Mxfp4, Mxfp8, Nvfp4, Fp8Block>;

}  // namespace monograph
