// The subcommands of `monograph adapter`.
#pragma once

#include "command.h"

namespace monograph::cli {

extern const Command kAdapterCheck;
extern const Command kAdapterConvert;

}  // namespace monograph::cli
