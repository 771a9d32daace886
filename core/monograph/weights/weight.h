// A weight of a checkpoint: plain, or packed, which is several tensors under names that its
// producer chose. list_weights (quant_methods/) makes it; what it says holds for its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/formats/packed_view.h"
#include "monograph/safetensors/checkpoint.h"
#include "monograph/text/json_document.h"

namespace monograph {

// One tensor of a weight and what it is to it: "values", "absmax", "scale" ...
struct Part {
  std::string_view role;
  safetensors::LocatedTensor tensor;
};

struct ComposedWeight;

// Elements of a weight in another kind of file than safetensors.
class ElementSource {
 public:
  virtual ~ElementSource() = default;
  // Elements [begin, end) of the flattened weight.
  virtual void read(std::uint64_t begin, std::uint64_t end, float* out) const = 0;
  // As they are stored, in the order of the file.
  virtual std::span<const std::uint8_t> bytes() const = 0;
  // Whether equal bytes of the two are equal weights; of one shape and format.
  virtual bool has_order_of(const ElementSource& other) const = 0;
};

struct Weight {
  std::string name;               // as the model knows it: "model.layers.0.mlp.up_proj.weight"
  std::string_view format;        // "nf4", "fp8-block" ...; of a plain one its dtype: "bf16", "i64"
  std::string_view quant_method;  // who writes it so: "bitsandbytes", "ModelOpt" ...; "plain"
  std::vector<std::uint64_t> shape;  // logical: of the dequantised weight
  std::uint64_t elements = 0;
  // How far a scale reaches: {64} consecutive elements, or {128, 128} rows and columns. Empty for a
  // plain weight.
  std::vector<std::uint64_t> block;
  bool double_quant = false;
  // The element type of a plain weight; of a packed one that of the weight it was made from, as far
  // as the file says, else BF16.
  safetensors::StoredDType dtype = safetensors::StoredDType::kBF16;
  std::vector<Part> parts;         // the values first
  std::uint64_t size_bytes = 0;    // of all parts
  std::optional<PackedView> view;  // set if this library can decode the format
  // Of a packed matrix whose columns are stored in another order: stored column i is column
  // columns[i] of the weight. Empty if they lie in order. `view` sees them as they are stored,
  // read_elements as the weight has them.
  std::vector<std::uint32_t> columns;
  // Set: the elements are those of other weights, put together (composed_weight.h).
  std::shared_ptr<const ComposedWeight> composed;
  // Set: the elements are there, and `parts` is empty. For commands that only read elements.
  std::shared_ptr<const ElementSource> source;

  bool is_packed() const { return quant_method != "plain"; }
  // Whether read_elements works.
  bool is_readable() const;
  double bits_per_weight() const {
    return elements == 0 ? 0
                         : 8.0 * static_cast<double>(size_bytes) / static_cast<double>(elements);
  }
};

// Elements [begin, end) of the flattened weight, rounded once to `dtype` (a 64-bit float: to fp32
// first). Throws Error if the weight is not readable.
void read_elements(const Weight& weight, std::uint64_t begin, std::uint64_t end, DType dtype,
                   void* out);

// The type a packed weight was made from, as far as the file says; of a plain one its own (fp32
// for 64 bits).
DType source_dtype(const Weight& weight);

// Elements [begin, end) as files have them: those of a packed weight are decoded and rounded once
// to the type it was made from, as its library dequantises. Merging and exporting see these values,
// and dequantize writes them unless it is told another type. Throws Error if the weight is not
// readable.
void read_values(const Weight& weight, std::uint64_t begin, std::uint64_t end, float* out);

// The layer a weight belongs to, by the first ".N." in its name: "model.layers.0" for
// "model.layers.0.mlp.up_proj.weight", empty if there is none.
std::string_view layer_of(std::string_view name);

// The element type as a stored one, and back where there is one.
safetensors::StoredDType stored(DType dtype);
std::optional<DType> float_type(safetensors::StoredDType dtype);

// The float type of this short name: "bf16", "fp16" or "fp32".
std::optional<DType> find_dtype(std::string_view short_name);
// "bf16", "fp16", "fp32": as in formats and on the command line; other types in lower case.
std::string_view short_name(safetensors::StoredDType dtype);

}  // namespace monograph
