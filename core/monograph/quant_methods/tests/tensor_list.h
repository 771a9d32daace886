// A checkpoint for tests as a list of tensors, and the bitsandbytes weight that tests break.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "monograph/formats/all.h"
#include "monograph/formats/dynamic_map.h"
#include "monograph/safetensors/plan.h"

namespace monograph {

struct TestTensor {
  std::string name;
  safetensors::StoredDType dtype;
  std::vector<std::uint64_t> shape;
  std::string bytes;  // zeros if empty
};

class TensorList {
 public:
  TestTensor& add(std::string name, safetensors::StoredDType dtype,
                  std::vector<std::uint64_t> shape, std::string bytes = {}) {
    return tensors_.emplace_back(
        TestTensor{std::move(name), dtype, std::move(shape), std::move(bytes)});
  }
  TestTensor& at(const std::string& name) {
    for (TestTensor& tensor : tensors_) {
      if (tensor.name == name) return tensor;
    }
    return tensors_.front();
  }
  void remove(const std::string& name) {
    std::erase_if(tensors_, [&](const TestTensor& tensor) { return tensor.name == name; });
  }

  // The bytes of a safetensors file.
  std::string file() const {
    std::vector<safetensors::TensorSpec> specs;
    for (const TestTensor& tensor : tensors_) {
      specs.push_back({tensor.name, tensor.dtype, tensor.shape});
    }
    const safetensors::FilePlan plan = safetensors::plan_file(specs, {{"format", "pt"}});
    std::string file = plan.prefix;
    file.resize(plan.size_bytes, '\0');
    for (const TestTensor& tensor : tensors_) {
      const safetensors::TensorEntry& entry = *plan.header.find(tensor.name);
      std::memcpy(file.data() + entry.offset_bytes, tensor.bytes.data(), tensor.bytes.size());
    }
    return file;
  }

 private:
  std::vector<TestTensor> tensors_;
};

template <class T>
std::string bytes_of(const T* values, std::size_t count) {
  std::string bytes(count * sizeof(T), '\0');
  std::memcpy(bytes.data(), values, bytes.size());
  return bytes;
}

inline constexpr char kNestedState[] =
    R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4, 96], )"
    R"("nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5})";
inline constexpr char kPlainState[] =
    R"({"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [4, 96]})";

// "w.weight": 384 elements in 6 blocks, values all 0x3c.
inline TensorList nested_weight(const std::string& state = kNestedState) {
  using safetensors::StoredDType;
  TensorList list;
  const float group = 2.0f;
  list.add("w.weight", StoredDType::kU8, {192, 1}, std::string(192, '\x3c'));
  list.add("w.weight.absmax", StoredDType::kU8, {6}, std::string("\x00\x40\x80\xc0\xf0\xff", 6));
  list.add("w.weight.quant_map", StoredDType::kF32, {16}, bytes_of(Nf4::kValues, 16));
  list.add("w.weight.nested_absmax", StoredDType::kF32, {1}, bytes_of(&group, 1));
  list.add("w.weight.nested_quant_map", StoredDType::kF32, {256}, bytes_of(kDynamicMap, 256));
  list.add("w.weight.quant_state.bitsandbytes__nf4", StoredDType::kU8, {state.size()}, state);
  return list;
}

inline TensorList plain_scales_weight(const std::string& state = kPlainState) {
  using safetensors::StoredDType;
  TensorList list;
  const std::vector<float> absmax = {1, 2, 3, 4, 5, 6};
  list.add("w.weight", StoredDType::kU8, {192, 1}, std::string(192, '\x3c'));
  list.add("w.weight.absmax", StoredDType::kF32, {6}, bytes_of(absmax.data(), 6));
  list.add("w.weight.quant_map", StoredDType::kF32, {16}, bytes_of(Nf4::kValues, 16));
  list.add("w.weight.quant_state.bitsandbytes__nf4", StoredDType::kU8, {state.size()}, state);
  return list;
}

}  // namespace monograph
