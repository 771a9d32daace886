#include "monograph/quant_methods/quant_method.h"

#include <algorithm>

#include "monograph/base/error.h"

namespace monograph {

WrittenBy written_by(Format format, Stack stack) {
  const bool gpt_oss = stack == Stack::kGptOss;
  format = with_scale_kind(format, ScaleKind::kBf16);
  for (const QuantMethod* method : quant_methods()) {
    for (const WrittenForm& form : method->written) {
      if (form.format == format && (form.stack == Stack::kGptOss) == gpt_oss) {
        return {method, &form};
      }
    }
  }
  throw Error("this format is not one that is written");
}

std::vector<std::string_view> weight_formats() {
  // describe_fp8 says more exactly which one it is.
  std::vector<std::string_view> names = {"nf4", "nf4+dq", "fp4", "fp4+dq", "mxfp8"};
  const auto add = [&](std::string_view name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const QuantMethod* method : quant_methods()) {
    for (const StoredForm& form : method->stored) add(form.format);
  }
  // So does describe_packed_integers, of what is not decoded.
  add("int-packed");
  add("int-g_idx");
  // Columns sorted by group.
  add("int4+columns");
  add("int8+columns");
  for (std::size_t i = 0; i < safetensors::kStoredDTypes.size(); ++i) {
    add(short_name(static_cast<safetensors::StoredDType>(i)));
  }
  return names;
}

}  // namespace monograph
