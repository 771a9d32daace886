#include "monograph/quant_methods/list_weights.h"

#include <algorithm>
#include <set>

#include "monograph/base/error.h"
#include "monograph/quant_methods/quant_method.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using safetensors::Checkpoint;
using safetensors::LocatedTensor;

class Lister {
 public:
  Lister(const Checkpoint& checkpoint, const json::Value* config)
      : checkpoint_(checkpoint), config_(config) {}

  std::vector<Weight> run() {
    for (const QuantMethod* method : quant_methods()) {
      for (const StoredForm& form : method->stored) try_form(*method, form);
    }
    for (const LocatedTensor& tensor : checkpoint_.tensors()) {
      if (!claimed_.contains(tensor.entry)) add_plain(tensor);
    }
    std::sort(weights_.begin(), weights_.end(),
              [](const Weight& a, const Weight& b) { return a.name < b.name; });
    check_names();
    return std::move(weights_);
  }

 private:
  void try_form(const QuantMethod& method, const StoredForm& form) {
    for (const LocatedTensor& tensor : checkpoint_.tensors()) {
      if (!claimed_.contains(tensor.entry)) try_tensor(method, form, tensor);
    }
  }

  void try_tensor(const QuantMethod& method, const StoredForm& form, const LocatedTensor& tensor) {
    const std::string& name = tensor.entry->name;
    if (!name.ends_with(form.values)) return;
    const std::string stem = name.substr(0, name.size() - form.values.size());
    Weight weight;
    weight.name = stem + std::string(form.logical);
    weight.quant_method = method.name;
    weight.format = form.format;
    weight.parts.push_back({"values", tensor});
    for (const PartName& part : form.parts) {
      if (part.suffix.empty()) continue;
      const LocatedTensor* found = checkpoint_.find(stem + std::string(part.suffix));
      if (found != nullptr && !claimed_.contains(found->entry)) {
        weight.parts.push_back({part.role, *found});
      } else if (part.required) {
        return;
      }
    }
    const Candidate candidate(config_, weight);
    if (!form.matches(candidate)) return;
    form.describe(candidate);
    for (const Part& part : weight.parts) {
      claimed_.insert(part.tensor.entry);
      weight.size_bytes += part.tensor.entry->size_bytes;
    }
    weights_.push_back(std::move(weight));
  }

  // quant_method of config.json, or "" if there is none.
  std::string_view configured_method() const {
    const json::Value* quantization =
        config_ == nullptr ? nullptr : config_->find("quantization_config");
    const json::Value* method =
        quantization == nullptr ? nullptr : quantization->find("quant_method");
    return method == nullptr ? std::string_view() : method->as_string().value_or("");
  }

  // A tensor that belongs to a weight that is not there.
  void check_orphan(const QuantMethod& method, const LocatedTensor& tensor) const {
    const std::string& name = tensor.entry->name;
    // With columns in another order a folder has compressed-tensors' names and our method.
    const std::string_view configured =
        configured_method() == "monograph" ? "compressed-tensors" : configured_method();
    if (method.orphans_by_config && configured != method.name) return;
    for (const std::string_view suffix : method.orphans) {
      const auto at = name.rfind(suffix);
      if (at == std::string::npos || at == 0) continue;
      // .quant_state.bitsandbytes__nf4: the suffix goes on.
      if (at + suffix.size() != name.size() && suffix.back() != '_') continue;
      throw Error(tensor.file->path().string() + ": tensor " + text::in_quotes(name) +
                  ": belongs to a " + std::string(method.name) + " weight " +
                  text::in_quotes(name.substr(0, at)) + " that lacks " +
                  std::string(method.orphan_lacks));
    }
  }

  // Codes without their scales would be taken for numbers.
  void check_codes(const LocatedTensor& tensor) const {
    using safetensors::StoredDType;
    const StoredDType dtype = tensor.entry->dtype;
    const bool codes = dtype == StoredDType::kF8E4M3 || dtype == StoredDType::kI8;
    if (!codes || configured_method().empty() || !tensor.entry->name.ends_with(".weight")) return;
    throw Error(tensor.file->path().string() + ": tensor " + text::in_quotes(tensor.entry->name) +
                ": is " + std::string(name_of(dtype)) + " without the scales that " +
                std::string(configured_method()) + " stores beside it");
  }

  void add_plain(const LocatedTensor& tensor) {
    const std::string& name = tensor.entry->name;
    check_codes(tensor);
    for (const QuantMethod* method : quant_methods()) check_orphan(*method, tensor);
    Weight weight;
    weight.name = name;
    weight.quant_method = "plain";
    weight.dtype = tensor.entry->dtype;
    weight.format = short_name(weight.dtype);
    weight.shape = tensor.entry->shape;
    weight.elements = tensor.entry->elements;
    weight.size_bytes = tensor.entry->size_bytes;
    weight.parts.push_back({"values", tensor});
    weights_.push_back(std::move(weight));
  }

  // x.weight_packed and x.weight would both be x.weight.
  void check_names() const {
    const auto twice =
        std::adjacent_find(weights_.begin(), weights_.end(),
                           [](const Weight& a, const Weight& b) { return a.name == b.name; });
    if (twice == weights_.end()) return;
    throw Error(twice->parts.front().tensor.file->path().string() + ": weight " +
                text::in_quotes(twice->name) + ": is stored twice, as " +
                std::string(twice->format) + " and as " + std::string(std::next(twice)->format));
  }

  const Checkpoint& checkpoint_;
  const json::Value* config_;
  std::set<const safetensors::TensorEntry*> claimed_;
  std::vector<Weight> weights_;
};

}  // namespace

std::vector<Weight> list_weights(const Checkpoint& checkpoint, const json::Value* config) {
  return Lister(checkpoint, config).run();
}

}  // namespace monograph
