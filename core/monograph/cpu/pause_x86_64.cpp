#include "monograph/cpu/pause.h"

namespace monograph {

void pause_core() { __builtin_ia32_pause(); }

}  // namespace monograph
