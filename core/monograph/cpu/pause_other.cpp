#include <thread>

#include "monograph/cpu/pause.h"

namespace monograph {

void pause_core() { std::this_thread::yield(); }

}  // namespace monograph
