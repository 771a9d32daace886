// What units of Arm's instruction sets include. As precompiled_standard.h.
#include <arm_neon.h>

#include "precompiled_contracts.h"
