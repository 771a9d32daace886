// The frozen base of a run: a mapped folder whose packed weights are read where they lie. What is
// not packed is in the type of the model: mapped where the file has that type, else a copy.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/formats/slice.h"
#include "monograph/kernels/linear/operands.h"
#include "monograph/safetensors/checkpoint.h"
#include "monograph/text/json_document.h"
#include "monograph/train/model_config.h"
#include "monograph/weights/weight.h"

namespace monograph::train {

struct BaseProjection {
  std::string module;  // "model.layers.0.self_attn.q_proj"
  LinearWeight weight;
  bool packed = false;
  const void* bias = nullptr;  // nullptr for none
};

// A mixture of experts, packed as stacks; count 0: the layer has an MLP.
struct BaseExperts {
  std::size_t count = 0;
  LinearWeight router;  // [count, width], plain
  PackedGrids up,
      down;  // gate and up of each expert, [count, 2 inner, width]; [count, width, inner]
};

struct BaseLayer {
  // What a norm multiplies by. Empty for none.
  std::vector<float> input_norm, middle_norm;     // before attention and MLP
  std::vector<float> query_norm, key_norm;        // of each head
  std::vector<float> attended_norm, output_norm;  // behind attention and MLP
  // In the order of the model's modules, which is that of the flat parameters.
  BaseProjection query, key, value, out;
  BaseProjection gate, up, down;  // with a module each, unless there are experts
  BaseExperts experts;
};

class BaseModel {
 public:
  // Throws Error if a key of config.json or a weight is one that the trainer does not know, if one
  // is missing, or if a shape is not that of the config; IoError if a file cannot be read.
  BaseModel(const std::filesystem::path& folder, DType dtype);

  const ModelConfig& config() const { return config_; }
  DType dtype() const { return dtype_; }
  const std::vector<BaseLayer>& layers() const { return layers_; }
  const std::vector<float>& final_norm() const { return final_norm_; }
  const LinearWeight& head() const { return head_; }
  const safetensors::Checkpoint& checkpoint() const { return checkpoint_; }
  // The hash of config.json, which the forward pass follows as much as the tensors.
  const std::string& config_sha256() const { return config_sha256_; }

  // Of the tensors of its files, and of those that are copied because they have another type there.
  std::uint64_t nbytes() const;

  // Rows of the embedding, in the type of the model, scaled. An id is below the vocabulary: checked
  // here.
  void embed(const std::vector<std::int64_t>& ids, void* out) const;

 private:
  const Weight* find(const std::string& name);
  const Weight& shaped(const std::string& name, const std::vector<std::uint64_t>& shape);
  const void* values_of(const Weight& weight);
  LinearWeight matrix(const std::string& name, std::size_t rows, std::size_t cols, bool* packed);
  BaseProjection projection(const std::string& module, std::size_t rows, std::size_t cols,
                            bool biased);
  PackedGrids stack(const std::string& name, std::size_t rows, std::size_t cols);
  BaseExperts read_experts(const std::string& mlp);
  std::vector<float> gain(const std::string& name, std::size_t size);
  BaseLayer read_layer(std::size_t number);
  void read_vocabulary();
  void refuse_unused() const;

  std::string folder_;
  DType dtype_;
  std::string config_sha256_;
  json::Value json_;
  ModelConfig config_;
  safetensors::Checkpoint checkpoint_;
  std::vector<Weight> weights_;
  std::map<std::string_view, const Weight*> by_name_;
  std::set<const Weight*> used_;
  std::deque<std::vector<float>> copies_;  // as memory: of any type
  std::vector<BaseLayer> layers_;
  std::vector<float> final_norm_;
  const Weight* embedding_ = nullptr;
  LinearWeight head_;
};

}  // namespace monograph::train
