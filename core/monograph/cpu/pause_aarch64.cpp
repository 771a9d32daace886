#include "monograph/cpu/pause.h"

namespace monograph {

void pause_core() { asm volatile("yield"); }

}  // namespace monograph
