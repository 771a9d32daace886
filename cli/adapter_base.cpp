#include "adapter_base.h"

#include "monograph/base/error.h"
#include "monograph/gguf/import_config.h"
#include "monograph/gguf/tensor_weights.h"

namespace monograph::cli {

AdapterBase::AdapterBase(const std::filesystem::path& path, std::string_view server) {
  if (!gguf::is_gguf(path)) {
    model_ = open_model(path);
    if (model_.config) config_ = *model_.config;
    return;
  }
  if (server != "llama.cpp") {
    throw Error(path.string() + ": is a GGUF file, and " + std::string(server) +
                " wants a folder; monograph dequantize makes one of it");
  }
  file_ = std::make_shared<const gguf::FileReader>(path);
  model_.folder = path.parent_path();
  read_gguf();
}

void AdapterBase::read_gguf() {
  config_ = gguf::import_config(*file_, DType::kBFloat16);
  model_.weights = gguf::weights_of(file_, gguf::TensorNames::kOfTransformers);
  for (Weight& weight : model_.weights) {
    weight.source.reset();  // not readable
    weight.format = {};     // gate and up of experts are one parameter, whatever their types are
  }
}

std::vector<files::FileId> AdapterBase::ids() const {
  if (file_) return {file_->id()};
  return model_.checkpoint.ids();
}

std::string AdapterBase::differs(const std::string& adapter, const safetensors::Checkpoint& tensors,
                                 const Session& session) const {
  return file_ ? another_base(adapter, tensors, *file_, session)
               : another_base(adapter, tensors, model_, session);
}

}  // namespace monograph::cli
