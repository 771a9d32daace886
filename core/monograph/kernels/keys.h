// What kernels are chosen by, beside the instruction set.
#pragma once

#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/formats/format.h"

namespace monograph {

struct ByFormat {
  Format format;
  bool operator==(const ByFormat&) const = default;
};

inline std::vector<ByFormat> every_format() {
  std::vector<ByFormat> keys;
  for (const FormatInfo& info : formats()) keys.push_back({info.format});
  return keys;
}

struct ByDType {
  DType dtype;
  bool operator==(const ByDType&) const = default;
};

inline std::vector<ByDType> every_dtype() {
  return {{DType::kBFloat16}, {DType::kFloat16}, {DType::kFloat32}};
}

}  // namespace monograph
