// A GGUF file as one JSON document: what stands beside the weights in a folder of transformers, and
// where each weight lies in the file.
#pragma once

#include "monograph/gguf/file_reader.h"
#include "monograph/text/json_document.h"

namespace monograph::gguf {

//   config, tokenizer, tokenizer_config, generation_config   the files of that name; the last only
//     if the file says more than config does
//   no_tokenizer   in their place, why the tokenizer cannot be read
//   tensors        of each, in the file's order: name, type, shape as import.h gives them, offset
//     from the begin of the file and bytes; head_rows (permuted_head_rows) and subtract_one where
//     they are set
// Throws Error as import_config and plan_import do.
json::Value describe(const FileReader& file);

}  // namespace monograph::gguf
