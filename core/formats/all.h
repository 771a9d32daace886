// Every packed format as a type. Kernels are templates over a format; this list is what they are
// instantiated for.
#pragma once

#include "formats/fp4.h"
#include "formats/nf4.h"

namespace monograph {

template <class... Fs>
struct FormatList {};

using PackedFormats = FormatList<Nf4, Fp4>;

}  // namespace monograph
