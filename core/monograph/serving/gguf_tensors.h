// The tensors of llama.cpp that a form of an adapter acts on.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "monograph/adapter/base_modules.h"
#include "monograph/serving/form.h"

namespace monograph {

// One tensor of llama.cpp: the pairs of its experts, or one.
struct GgufTensor {
  std::string name;
  std::uint64_t permuted_heads = 0;
  std::map<std::uint64_t, const ServedPair*> pairs;  // by expert
  std::uint64_t experts = 0;                         // 0: one matrix
  bool embedding = false;
};

// By name, of `form`, made for Server::kLlamaCpp; it must outlive the result. Throws Error if a
// module has no tensor in llama.cpp, or the tensor cannot take it.
std::map<std::string, GgufTensor> gguf_tensors(const ServingForm& form, const BaseModules& base);
// The same for what it throws.
void check_gguf_lora(const ServingForm& form, const BaseModules& base);

}  // namespace monograph
