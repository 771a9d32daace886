// What units of x86's instruction sets include. As precompiled_standard.h.
#include <immintrin.h>

#include "precompiled_contracts.h"
