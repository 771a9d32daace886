#include "monograph/convert/stacked_copy.h"

#include <algorithm>
#include <optional>

#include "monograph/base/error.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/quant_methods/quant_state.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/composed_weight.h"

namespace monograph {
namespace {

using safetensors::LocatedTensor;

class Stacker {
 public:
  explicit Stacker(const Conversion& conversion)
      : stack_(*conversion.weight), sources_(stack_.composed->sources) {
    const std::string_view format = stack_.format;
    const auto known = written_format(format);
    const bool groups = known && find_format(*known)->shape == BlockShape::kGroup;
    if (!known || groups || stack_.quant_method != producer_of(*known) || !stack_.is_readable()) {
      fail("a stack has no names for " + std::string(format) + " of " +
           std::string(stack_.quant_method));
    }
    as_ = conversion;
    as_.action = Action::kQuantize;
    as_.stack = Stack::kOwn;
    as_.format = *known;
    as_.block = stack_.block.back();
    each_ = sources_.size() / stack_.shape[0];
  }

  std::vector<StackedPart> run() const {
    for (const Part& part : sources_.front().parts) {
      if (part.role == "input_scale") fail("it has input scales, which belong to activations");
    }
    const bool bitsandbytes = stack_.quant_method == "bitsandbytes";
    if (stack_.double_quant) fail("each matrix has quantised scales with an offset of its own");
    const std::uint64_t rows = sources_.front().shape[0];
    if (as_.format == Format::kFp8Block && each_ > 1 && rows % as_.block != 0) {
      fail("gate has " + std::to_string(rows) + " rows, wanted whole blocks of " +
           std::to_string(as_.block));
    }
    std::vector<StackedPart> parts;
    for (const safetensors::TensorSpec& spec : packed_specs(as_)) parts.push_back({spec, {}, {}});
    fill(parts[0], "values", 1);
    fill(parts[1], bitsandbytes ? "absmax" : "scale", 1);
    if (as_.format == Format::kNvfp4Divide) {
      check_shared_scales();
      fill(parts[2], "global_scale", each_);
    }
    if (bitsandbytes) {
      parts[2].sources = {part_of(sources_.front(), "quant_map")};
      QuantState state;
      state.format = as_.format;
      state.block = as_.block;
      state.dtype = source_dtype(stack_);
      state.shape = stack_.shape;
      state.elements = stack_.elements;
      parts[3].text = quant_state_text(state);
    }
    for (const StackedPart& part : parts) check_size(part);
    return parts;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error("experts " + text::in_quotes(stack_.name) +
                " cannot be stacked as they are: " + what);
  }
  const LocatedTensor& part_of(const Weight& weight, std::string_view role) const {
    const auto found = std::find_if(weight.parts.begin(), weight.parts.end(),
                                    [&](const Part& part) { return part.role == role; });
    if (found == weight.parts.end()) {
      fail(text::in_quotes(weight.name) + " has no " + std::string(role));
    }
    return found->tensor;
  }
  // Of every `step`-th matrix, in the type that they have.
  void fill(StackedPart& part, std::string_view role, std::size_t step) const {
    for (std::size_t i = 0; i < sources_.size(); i += step) {
      part.sources.push_back(part_of(sources_[i], role));
    }
    if (role != "values") part.spec.dtype = part.sources.front().entry->dtype;
    for (const LocatedTensor& source : part.sources) {
      if (source.entry->dtype != part.sources.front().entry->dtype) {
        fail(text::in_quotes(source.entry->name) + " is of another type than the first");
      }
    }
  }
  void check_shared_scales() const {
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      const auto first = part_of(sources_[i - i % each_], "global_scale").bytes();
      const auto own = part_of(sources_[i], "global_scale").bytes();
      if (!std::equal(first.begin(), first.end(), own.begin(), own.end())) {
        fail(text::in_quotes(sources_[i].name) + " has another global scale than its gate");
      }
    }
  }
  void check_size(const StackedPart& part) const {
    std::uint64_t bytes = part.text.size();
    for (const LocatedTensor& source : part.sources) bytes += source.entry->size_bytes;
    if (bytes == size_bytes(part.spec)) return;
    fail(text::in_quotes(part.spec.name) + " would have " + std::to_string(bytes) +
         " bytes, wanted " + std::to_string(size_bytes(part.spec)));
  }

  const Weight& stack_;
  const std::vector<Weight>& sources_;
  Conversion as_;
  std::size_t each_ = 1;  // matrices of an expert
};

}  // namespace

std::vector<StackedPart> stacked_parts(const Conversion& conversion) {
  return Stacker(conversion).run();
}

}  // namespace monograph
