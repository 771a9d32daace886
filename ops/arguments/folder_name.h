// The folder that an operator is given, as the bytes of its name: operators take no strings.
#pragma once

#include <string>

#include "stable.h"

namespace monograph::ops {

// Refuses, naming `op`, what is no name: other than uint8 [n] on the CPU, a byte 0, no UTF-8.
std::string folder_name(const char* op, const Tensor& folder);

}  // namespace monograph::ops
