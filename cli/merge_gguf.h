// monograph merge of a GGUF file: the same file, with the adapters in it.
#pragma once

#include "merge_options.h"

namespace monograph::cli {

int merge_gguf(const MergeOptions& options, const Session& session);

}  // namespace monograph::cli
