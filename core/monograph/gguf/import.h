// The weights of a GGUF file as a checkpoint of transformers: its names, its order of rows, one
// tensor an expert. Values are decoded and rounded once.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/gguf/file_reader.h"
#include "monograph/safetensors/plan.h"
#include "monograph/safetensors/writer.h"

namespace monograph::gguf {

struct ImportedTensor {
  const TensorInfo* info = nullptr;
  std::uint64_t first_row = 0;           // of the file's tensor; not 0 for later experts
  std::vector<std::uint64_t> shape;      // of the checkpoint's tensor
  std::string name;                      // in the checkpoint
  std::uint64_t permuted_head_rows = 0;  // not 0: rows in llama.cpp's order (row_order.h)
  bool subtract_one = false;             // Gemma's norms are stored as what is multiplied with
  // All experts of a layer in one, of weights [experts, inputs, outputs]; outputs take turns with
  // those of `odd` where that is set.
  bool stacked = false;
  const TensorInfo* odd = nullptr;
};

struct ImportPlan {
  std::vector<ImportedTensor> tensors;
  std::vector<std::string>
      left_out;  // what config.json says in transformers: rope_freqs.weight and others
};

// Throws Error for an architecture or a tensor that has no name in transformers, and for heads that
// do not divide rows. The file must outlive the plan.
ImportPlan plan_import(const FileReader& file);

// The plan of a gpt-oss with one tensor for the experts of a layer, as transformers stores them:
// "X.experts.gate_up_proj", its bias "X.experts.gate_up_proj_bias". Throws Error where gate and up
// differ in shape.
ImportPlan with_stacks_in_turns(const FileReader& file, ImportPlan plan);

// Rows of the checkpoint's tensor, a vector being one.
std::uint64_t rows_of(const ImportedTensor& tensor);

// Rows [begin, end) of the checkpoint's tensor in float32.
void read_rows(const FileReader& file, const ImportedTensor& tensor, std::uint64_t begin,
               std::uint64_t end, float* out);

std::vector<safetensors::TensorSpec> specs_of(const ImportPlan& plan, DType dtype);

struct ImportOptions {
  int threads = 1;
  // Called with the bytes of the file of each piece done, from any thread; what it throws ends the
  // work.
  std::function<void(std::uint64_t)> advance = [](std::uint64_t) {};
};

// Writes every tensor of specs_of; the caller finishes the writer. The same bytes for any number of
// threads. Throws Error for a value that is not finite in `dtype`.
void write_import(const ImportPlan& plan, const FileReader& file, DType dtype,
                  safetensors::ShardedWriter& writer, const ImportOptions& options);

}  // namespace monograph::gguf
