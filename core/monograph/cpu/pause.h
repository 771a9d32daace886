// One turn of a loop that waits for another thread.
#pragma once

namespace monograph {

// Leaves the core's units to its other thread for a moment; 10 to 60 ns.
void pause_core();

}  // namespace monograph
