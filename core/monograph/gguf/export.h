// A model folder as one GGUF file: which tensor becomes what, and the writing, row by row.
// Memory does not grow with the model: the source is mapped, a thread holds a few rows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "monograph/gguf/file_writer.h"
#include "monograph/gguf/model_config.h"
#include "monograph/gguf/tokenizer.h"
#include "monograph/weights/experts.h"

namespace monograph::gguf {

// What a tensor has of a stack of experts with gate and up in one: of the `all` rows of each expert
// those from `first` on, or every `step`-th. `all` is 0 where a tensor has the rows of its weight
// in order.
struct RowsOfExperts {
  std::uint64_t all = 0, first = 0, step = 1;
};

struct ExportedTensor {
  TensorInfo info;
  const Weight* weight = nullptr;  // null: `values` are written
  std::vector<float> values;
  std::uint64_t permuted_head_rows = 0;  // not 0: rows in llama.cpp's order (row_order.h)
  bool add_one = false;                  // Gemma's norms are stored as what is added to one
  RowsOfExperts rows_of_experts;
  bool keeps_blocks = false;  // of a weight in MXFP4: its codes and scales, not its values
};

// Rows of all experts, a vector being one.
std::uint64_t rows_of(const ExportedTensor& tensor);

struct ExportPlan {
  ModelConfig config;
  std::vector<ExportedTensor> tensors;
  std::vector<std::string> fallbacks;  // their rows are not made of whole blocks of the type
  std::vector<std::string> left_out;   // weights of other modalities, and a tied head
  std::shared_ptr<const ExpertStacks> experts;  // what tensors of experts point into
};

// Matrices become `type`, vectors f32. As llama.cpp does: rows that are no multiple of the block
// become f16; under the mixtures, of which TensorType has the type of most matrices, mixture.h.
// Under q4_0 and mxfp4 embedding and head become q8_0, under mxfp4 of a mixture all but the
// experts. With `keeps_mxfp4` experts that are stored in MXFP4 stay so, whatever `type` is. Every
// tensor of the architecture must be there in the shape that config.json says, and nothing else.
// `experts` are those of `weights`. Throws Error.
ExportPlan plan_export(const std::vector<Weight>& weights, ExpertStacks experts, ModelConfig config,
                       TensorType type, bool keeps_mxfp4 = false);

// All of it: general keys, architecture, tokenizer.
Metadata export_metadata(const ExportPlan& plan, const Tokenizer& tokenizer, TensorType type,
                         const std::string& name);

// How rows of one tensor become what is stored; called by several threads at once.
class RowEncoder {
 public:
  virtual ~RowEncoder() = default;
  // Whole rows, finite and up to the largest magnitude of the type.
  virtual void encode(TensorType type, std::span<const float> values, std::uint8_t* out) const = 0;
};

struct ExportOptions {
  int threads = 1;
  // Called once for a tensor, when its rows begin; what it returns lives until they are done. Null:
  // encode() of encode_blocks.h.
  std::function<std::shared_ptr<const RowEncoder>(const ExportedTensor&)> encoder_of =
      [](const ExportedTensor&) { return nullptr; };
  // Called with the bytes of the file of each piece done, from any thread; what it throws ends the
  // work.
  std::function<void(std::uint64_t)> advance = [](std::uint64_t) {};
};

// The file appears complete or not at all; the same bytes for any number of threads. Throws Error
// if a value cannot be stored: NaN or infinity in a block, a number beyond f16 or a block's scale.
void write_export(const ExportPlan& plan, const FilePlan& file, const std::filesystem::path& target,
                  std::span<const files::FileId> inputs, const ExportOptions& options);

}  // namespace monograph::gguf
