#include "monograph/train/base_model.h"

#include <cstring>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/files/mapped_file.h"
#include "monograph/hash/sha256.h"
#include "monograph/quant_methods/list_weights.h"
#include "monograph/quant_methods/transforms.h"

namespace monograph::train {
namespace {

// A base that is a file is named as what it is, before something in it is looked for.
const std::filesystem::path& folder_of(const std::filesystem::path& base) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(base, ignored)) return base;
  throw Error(
      base.string() + ": is a file, wanted the folder that monograph quantize makes" +
      (base.extension() == ".gguf" ? "; monograph train takes a GGUF file as its base" : ""));
}

json::Value read_json(const std::filesystem::path& path, std::string& sha256) {
  const files::MappedFile file(path);
  const std::span<const std::uint8_t> bytes = file.bytes();
  Sha256 hash;
  hash.add(bytes);
  sha256 = hash.hex();
  return json::parse({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path.string());
}

std::string shape_of(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (const std::uint64_t size : shape)
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// The factor rounded to the type first, as transformers has it.
void scale_row(std::byte* row, std::size_t size, float factor, DType dtype) {
  with_type(dtype, [&]<class T>() {
    T* const values = reinterpret_cast<T*>(row);
    const float rounded = to_float(from_float<T>(factor));
    for (std::size_t i = 0; i < size; ++i) values[i] = from_float<T>(to_float(values[i]) * rounded);
  });
}

// Buffers of older files, which transformers computes anew.
bool is_harmless(std::string_view name) { return name.ends_with(".rotary_emb.inv_freq"); }

}  // namespace

BaseModel::BaseModel(const std::filesystem::path& folder, DType dtype)
    : folder_(folder.string()),
      dtype_(dtype),
      json_(read_json(folder_of(folder) / "config.json", config_sha256_)),
      config_(read_model_config(json_, (folder / "config.json").string())),
      checkpoint_(safetensors::Checkpoint::open(folder)),
      weights_(list_weights(checkpoint_, &json_)) {
  refuse_transforms(&json_, folder_);
  for (const Weight& weight : weights_) by_name_[weight.name] = &weight;
  for (std::size_t i = 0; i < config_.layers; ++i) layers_.push_back(read_layer(i));
  final_norm_ = gain("model.norm.weight", config_.width);
  read_vocabulary();
  refuse_unused();
}

const Weight* BaseModel::find(const std::string& name) {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return nullptr;
  used_.insert(found->second);
  return found->second;
}

const Weight& BaseModel::shaped(const std::string& name, const std::vector<std::uint64_t>& shape) {
  const Weight* const weight = find(name);
  if (weight == nullptr) throw Error(folder_ + ": has no " + name);
  if (weight->shape != shape)
    throw Error(folder_ + ": " + name + " is " + shape_of(weight->shape) + ", wanted " +
                shape_of(shape) + " by config.json");
  return *weight;
}

const void* BaseModel::values_of(const Weight& weight) {
  if (weight.is_packed() || !float_type(weight.dtype))
    throw Error(folder_ + ": " + weight.name + " is " + std::string(weight.format) +
                ", wanted float32, bfloat16 or float16");
  const std::uint8_t* const mapped =
      weight.parts.empty() ? nullptr : weight.parts[0].tensor.bytes().data();
  const bool aligned = reinterpret_cast<std::uintptr_t>(mapped) % size_bytes(dtype_) == 0;
  if (mapped != nullptr && weight.composed == nullptr && float_type(weight.dtype) == dtype_ &&
      aligned)
    return mapped;
  copies_.emplace_back((weight.elements * size_bytes(dtype_) + 3) / 4);
  read_elements(weight, 0, weight.elements, dtype_, copies_.back().data());
  return copies_.back().data();
}

LinearWeight BaseModel::matrix(const std::string& name, std::size_t rows, std::size_t cols,
                               bool* packed) {
  const Weight& weight = shaped(name, {rows, cols});
  LinearWeight found;
  found.dtype = dtype_;
  *packed = weight.is_packed();
  if (!*packed) {
    found.packed.rows = rows;
    found.packed.cols = cols;
    found.packed.values = static_cast<const std::uint8_t*>(values_of(weight));
    return found;
  }
  if (!weight.view || weight.composed != nullptr || !weight.columns.empty())
    throw Error(folder_ + ": " + name + " is " + std::string(weight.format) + " by " +
                std::string(weight.quant_method) +
                (weight.columns.empty() ? "" : " with its columns in another order") +
                ", which the native trainer does not read; wanted a folder by monograph quantize");
  found.packed = *weight.view;
  return found;
}

BaseProjection BaseModel::projection(const std::string& module, std::size_t rows, std::size_t cols,
                                     bool biased) {
  BaseProjection found;
  found.module = module;
  found.weight = matrix(module + ".weight", rows, cols, &found.packed);
  if (biased) found.bias = values_of(shaped(module + ".bias", {rows}));
  return found;
}

PackedGrids BaseModel::stack(const std::string& name, std::size_t rows, std::size_t cols) {
  const std::size_t count = config_.experts.count;
  const char* const wanted = "; wanted experts in stacks, by monograph quantize --experts stack";
  if (!by_name_.contains(name)) throw Error(folder_ + ": has no " + name + wanted);
  const Weight& weight = shaped(name, {count, rows, cols});
  const bool whole = weight.view && weight.composed == nullptr && weight.columns.empty() &&
                     weight.view->rows == count * rows && weight.view->cols == cols;
  if (!weight.is_packed() || !whole)
    throw Error(folder_ + ": " + name + " is " + std::string(weight.format) + wanted);
  PackedGrids grids;
  grids.first = *weight.view;
  return grids;
}

BaseExperts BaseModel::read_experts(const std::string& mlp) {
  const ExpertsConfig& c = config_.experts;
  BaseExperts experts;
  experts.count = c.count;
  bool packed = false;
  experts.router = matrix(mlp + ".gate.weight", c.count, config_.width, &packed);
  if (packed) throw Error(folder_ + ": " + mlp + ".gate.weight is packed, wanted a plain router");
  experts.up = stack(mlp + ".experts.gate_up_proj", 2 * c.inner, config_.width);
  experts.down = stack(mlp + ".experts.down_proj", config_.width, c.inner);
  return experts;
}

std::vector<float> BaseModel::gain(const std::string& name, std::size_t size) {
  const void* const values = values_of(shaped(name, {size}));
  std::vector<float> found(size);
  with_type(dtype_, [&]<class T>() {
    for (std::size_t i = 0; i < size; ++i) found[i] = to_float(static_cast<const T*>(values)[i]);
  });
  if (config_.one_plus_gain)
    for (float& factor : found) factor = 1.0f + factor;
  return found;
}

BaseLayer BaseModel::read_layer(std::size_t number) {
  const std::string at = "model.layers." + std::to_string(number) + ".";
  const std::string attention = at + "self_attn.", mlp = at + "mlp.";
  const ModelConfig& c = config_;
  BaseLayer layer;
  layer.input_norm = gain(at + "input_layernorm.weight", c.width);
  const std::string behind = at + "post_attention_layernorm.weight";
  if (c.branch_norms) {
    layer.attended_norm = gain(behind, c.width);
    layer.middle_norm = gain(at + "pre_feedforward_layernorm.weight", c.width);
    layer.output_norm = gain(at + "post_feedforward_layernorm.weight", c.width);
  } else {
    layer.middle_norm = gain(behind, c.width);
  }
  if (c.head_norms) {
    layer.query_norm = gain(attention + "q_norm.weight", c.head_size);
    layer.key_norm = gain(attention + "k_norm.weight", c.head_size);
  }
  layer.query = projection(attention + "q_proj", c.query_width(), c.width, c.qkv_bias);
  layer.key = projection(attention + "k_proj", c.key_width(), c.width, c.qkv_bias);
  layer.value = projection(attention + "v_proj", c.key_width(), c.width, c.qkv_bias);
  layer.out = projection(attention + "o_proj", c.width, c.query_width(), c.out_bias);
  if (c.has_experts(number)) {
    layer.experts = read_experts(at + "mlp");
    return layer;
  }
  layer.gate = projection(mlp + "gate_proj", c.inner, c.width, c.mlp_bias);
  layer.up = projection(mlp + "up_proj", c.inner, c.width, c.mlp_bias);
  layer.down = projection(mlp + "down_proj", c.width, c.inner, c.mlp_bias);
  return layer;
}

void BaseModel::read_vocabulary() {
  embedding_ = &shaped("model.embed_tokens.weight", {config_.vocabulary, config_.width});
  if (embedding_->is_packed())
    throw Error(folder_ + ": model.embed_tokens.weight is " + std::string(embedding_->format) +
                ", wanted one that is not packed");
  bool packed = false;
  if (config_.tied && by_name_.contains("lm_head.weight"))
    throw Error(folder_ +
                ": has lm_head.weight, and config.json says tie_word_embeddings: true; wanted one "
                "of the two");
  head_ = matrix(config_.tied ? "model.embed_tokens.weight" : "lm_head.weight", config_.vocabulary,
                 config_.width, &packed);
}

void BaseModel::refuse_unused() const {
  for (const Weight& weight : weights_)
    if (!used_.contains(&weight) && !is_harmless(weight.name))
      throw Error(folder_ + ": " + weight.name + " has no place in a " + config_.family +
                  " of this config.json");
}

std::uint64_t BaseModel::nbytes() const {
  std::uint64_t bytes = 0;
  for (const safetensors::LocatedTensor& tensor : checkpoint_.tensors())
    bytes += tensor.bytes().size();
  for (const std::vector<float>& copy : copies_) bytes += copy.size() * sizeof(float);
  return bytes;
}

void BaseModel::embed(const std::vector<std::int64_t>& ids, void* out) const {
  const std::size_t row = config_.width * size_bytes(dtype_);
  auto* to = static_cast<std::byte*>(out);
  const auto factor = static_cast<float>(config_.embedding_scale);
  for (const std::int64_t id : ids) {
    if (id < 0 || static_cast<std::size_t>(id) >= config_.vocabulary)
      throw Error("token " + std::to_string(id) + ": the embedding of " + folder_ + " has " +
                  std::to_string(config_.vocabulary) + " rows");
    const std::uint64_t begin = static_cast<std::uint64_t>(id) * config_.width;
    read_elements(*embedding_, begin, begin + config_.width, dtype_, to);
    if (factor != 1.0f) scale_row(to, config_.width, factor, dtype_);
    to += row;
  }
}

}  // namespace monograph::train
