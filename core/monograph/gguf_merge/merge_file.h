// Adapters merged into a GGUF file: the same file with other codes in the tensors that they change.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "monograph/base/function_ref.h"
#include "monograph/cpu/parallel.h"
#include "monograph/gguf/file_reader.h"
#include "monograph/gguf/file_writer.h"
#include "monograph/gguf/import.h"
#include "monograph/merge/merge.h"

namespace monograph::gguf {

enum class BlockRounding : std::uint8_t {
  kByType,  // along the adapter below eight bits, else to the nearest
  kNearest,
  kAdapter,
};

// Throws Error for what is no other codes in the same tensors: new tokens, a head that no longer
// is the table of tokens, stacks of experts that are replaced. `plan` is of weights_of(file,
// kOfTransformers) and has `single_experts`.
void check_merge(const MergePlan& plan, const FileReader& file);

// The header of the file as it is, byte for byte.
FilePlan same_file(const FileReader& file);

// Every tensor: of those that nothing changes the bytes, of others each row rounded as
// round_blocks.h says, or once to a float. Rows are put back in the order of the file. The same
// bytes for any number of threads. `writer` is of same_file; the caller finishes it. Returns a row
// for each changed tensor, by the names of transformers, with a star for the experts of one. Throws
// Error if a value cannot be stored.
std::vector<MergeRow> write_merge(const MergePlan& plan, const ImportPlan& imported,
                                  const FileReader& file, BlockRounding rounding,
                                  FileWriter& writer, ParallelFor parallel_for,
                                  FunctionRef<void(std::uint64_t)> done);

}  // namespace monograph::gguf
