#include "monograph/gguf/tensor_weights.h"

#include <algorithm>

#include "monograph/gguf/import.h"

namespace monograph::gguf {
namespace {

class Elements final : public ElementSource {
 public:
  Elements(std::shared_ptr<const FileReader> file, ImportedTensor tensor)
      : file_(std::move(file)), tensor_(std::move(tensor)) {}

  void read(std::uint64_t begin, std::uint64_t end, float* out) const override {
    const std::uint64_t cols = tensor_.shape.back();
    const std::uint64_t first = begin / cols, last = (end + cols - 1) / cols;
    if (begin % cols == 0 && end % cols == 0) return read_rows(*file_, tensor_, first, last, out);
    std::vector<float> rows((last - first) * cols);
    read_rows(*file_, tensor_, first, last, rows.data());
    std::copy_n(rows.data() + begin % cols, end - begin, out);
  }

  std::span<const std::uint8_t> bytes() const override {
    const std::uint64_t cols = tensor_.shape.back();
    const std::uint64_t row = gguf::size_bytes(tensor_.info->type, cols);
    return file_->bytes(*tensor_.info).subspan(tensor_.first_row * row, rows_of(tensor_) * row);
  }

  bool has_order_of(const ElementSource& other) const override {
    const auto* elements = dynamic_cast<const Elements*>(&other);
    return elements != nullptr &&
           elements->tensor_.permuted_head_rows == tensor_.permuted_head_rows &&
           elements->tensor_.subtract_one == tensor_.subtract_one;
  }

 private:
  std::shared_ptr<const FileReader> file_;
  ImportedTensor tensor_;
};

std::vector<ImportedTensor> as_in_file(const FileReader& file) {
  std::vector<ImportedTensor> tensors;
  for (const TensorInfo& info : file.header().tensors) {
    ImportedTensor& tensor = tensors.emplace_back();
    tensor.info = &info;
    tensor.shape = info.shape;
    tensor.name = info.name;
  }
  return tensors;
}

}  // namespace

std::vector<Weight> weights_of(const std::shared_ptr<const FileReader>& file, TensorNames names) {
  const std::vector<ImportedTensor> tensors =
      names == TensorNames::kOfFile ? as_in_file(*file) : plan_import(*file).tensors;
  std::vector<Weight> weights;
  for (const ImportedTensor& tensor : tensors) {
    auto elements = std::make_shared<const Elements>(file, tensor);
    Weight& weight = weights.emplace_back();
    weight.name = tensor.name;
    weight.format = info_of(tensor.info->type).name;
    weight.quant_method = "GGUF";
    weight.shape = tensor.shape;
    weight.elements = rows_of(tensor) * tensor.shape.back();
    weight.dtype = safetensors::StoredDType::kF32;
    weight.size_bytes = elements->bytes().size();
    weight.source = std::move(elements);
  }
  std::sort(weights.begin(), weights.end(),
            [](const Weight& a, const Weight& b) { return a.name < b.name; });
  return weights;
}

}  // namespace monograph::gguf
