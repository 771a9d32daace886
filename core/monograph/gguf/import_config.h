// config.json of transformers out of the pairs of a GGUF file.
#pragma once

#include "monograph/base/dtype.h"
#include "monograph/gguf/file_reader.h"
#include "monograph/text/json_document.h"

namespace monograph::gguf {

// Every setting that the forward pass reads, so that no default of transformers takes part. Sizes
// are held to the tensors. Throws Error for what transformers has no setting for: another
// architecture than llama, qwen2, qwen3, qwen3moe, gemma3, phi3 and gpt-oss, a key of the
// architecture that is not known, a scaling of the rotary embedding that no setting gives.
json::Value import_config(const FileReader& file, DType dtype);

}  // namespace monograph::gguf
