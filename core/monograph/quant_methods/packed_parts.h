// The tensors of a quantised weight, in the spelling of a producer that loaders know:
//   nf4, fp4      bitsandbytes         X.weight, X.weight.absmax, .quant_map, .quant_state ...
//   mxfp4         compressed-tensors   X.weight_packed, X.weight_scale
//   mxfp8         compressed-tensors   X.weight, X.weight_scale
//   nvfp4-divide  compressed-tensors   X.weight_packed, X.weight_scale, X.weight_global_scale
//   fp8-block     DeepSeek             X.weight, X.weight_scale_inv
// and those of a stack P of experts, with one dimension more in front:
//   nf4, fp4      P, P.absmax ...; the blocks run on from expert to expert
//   others        the same endings behind P: P_packed or P, P_scale, P_global_scale [experts],
//                 P_scale_inv
//   mxfp4 of gpt-oss   P_blocks [experts, rows, blocks, 16], P_scales
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/quant_methods/packed_layout.h"

namespace monograph {

// The format of the table above that a user calls so: "nvfp4" is nvfp4-divide.
std::optional<Format> written_format(std::string_view name);
std::vector<std::string> written_names();
std::string_view written_name(Format format);
// Who spells it so: "bitsandbytes", "compressed-tensors" or "DeepSeek".
std::string_view producer_of(Format format);

// All tensors of the weight, the values first. Throws Error if the producer has no name for it:
// only bitsandbytes has one for a weight that is neither a matrix X.weight nor a stack.
std::vector<safetensors::TensorSpec> packed_specs(const Conversion& conversion);

// The name of the values: the weight's own, or the producer's.
std::string values_name(const Conversion& conversion);

// The scales of one weight, in the making or whole.
struct PackedScales {
  std::vector<float> words;  // those of the blocks as they are stored; fp32 words for alignment
  std::vector<TensorScales> tensors;  // one a matrix, for a format that has them

  void make_room(const PackedLayout& layout) {
    tensors.resize(layout.matrices());
    words.resize(ceil_div(layout.blocks() * layout.scale_bytes(), sizeof(float)));
  }
  std::uint8_t* at(const PackedLayout& layout, std::uint64_t block) {
    return reinterpret_cast<std::uint8_t*>(words.data()) + block * layout.scale_bytes();
  }
  // Of the matrix of this element.
  TensorScales& tensor_at(const PackedLayout& layout, std::uint64_t element) {
    const std::uint64_t matrix = layout.matrix_elements();
    return tensors[matrix == 0 ? 0 : std::min<std::uint64_t>(element / matrix, tensors.size() - 1)];
  }
};

// Everything but the values, from the scales of all blocks.
void write_packed_parts(const Conversion& conversion, const PackedScales& scales,
                        safetensors::ShardedWriter& writer);

}  // namespace monograph
