// The tensors of a quantised weight, as its producer names them (producers/). Those of a stack P of
// experts have one dimension more in front: the blocks of bitsandbytes run on from expert to
// expert, of others the endings stand behind P: P_packed or P, P_scale, P_global_scale [experts],
// P_scale_inv; of gpt-oss P_blocks and P_scales.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/quant_methods/packed_layout.h"
#include "monograph/safetensors/plan.h"
#include "monograph/safetensors/writer.h"

namespace monograph {

// The format that is written and that a user calls so: "nvfp4" is nvfp4-divide.
std::optional<Format> written_format(std::string_view name);
std::vector<std::string> written_names();
std::string_view written_name(Format format);
// Who writes it so: "bitsandbytes", "compressed-tensors" or "DeepSeek".
std::string_view producer_of(Format format);

// Of a format with groups of a row: its scales get the type that the weight has, as
// compressed-tensors gives them, and a block of 0 becomes the row.
void fit_groups(Conversion& conversion);

// All tensors of the weight, the values first. Throws Error if the producer has no name for it:
// only bitsandbytes has one for a weight that is neither a matrix X.weight nor a stack.
std::vector<safetensors::TensorSpec> packed_specs(const Conversion& conversion);

// The name of the values: the weight's own, or the producer's.
std::string values_name(const Conversion& conversion);

// The scales of one weight, in the making or whole.
struct PackedScales {
  std::vector<float> words;  // those of the blocks as they are stored; fp32 words for alignment
  std::vector<TensorScales> tensors;  // one a matrix, for a format that has them
  std::vector<std::uint8_t> zeros;    // a signed byte a block, where it has zero points

  void make_room(const PackedLayout& layout) {
    tensors.resize(layout.matrices());
    words.resize(ceil_div(layout.blocks() * layout.scale_bytes(), sizeof(float)));
    if (layout.has_zero_points()) zeros.resize(layout.blocks());
  }
  std::uint8_t* at(const PackedLayout& layout, std::uint64_t block) {
    return reinterpret_cast<std::uint8_t*>(words.data()) + block * layout.scale_bytes();
  }
  std::uint8_t* zeros_at(std::uint64_t block) {
    return zeros.empty() ? nullptr : zeros.data() + block;
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

// A whole tensor.
template <class T>
void write_array(safetensors::ShardedWriter& writer, const std::string& name, const T* data,
                 std::size_t count) {
  writer.write(name, 0, {reinterpret_cast<const std::uint8_t*>(data), count * sizeof(T)});
}

}  // namespace monograph
