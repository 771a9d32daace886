#include "monograph/weights/weight.h"

#include <algorithm>
#include <array>
#include <set>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/assembly.h"
#include "monograph/weights/spellings.h"

namespace monograph {
namespace {

using safetensors::Checkpoint;
using safetensors::LocatedTensor;
using safetensors::StoredDType;

constexpr std::array<std::string_view, 22> kShortNames = {
    "bool",    "f4",          "f6_e2m3",     "f6_e3m2", "u8",  "i8",   "f8_e5m2", "f8_e4m3",
    "f8_e8m0", "f8_e4m3fnuz", "f8_e5m2fnuz", "i16",     "u16", "fp16", "bf16",    "i32",
    "u32",     "fp32",        "c64",         "fp64",    "i64", "u64"};
static_assert(kShortNames[static_cast<std::size_t>(StoredDType::kU64)] == "u64");
static_assert(kShortNames[static_cast<std::size_t>(StoredDType::kBF16)] == "bf16");

// Suffixes that mean nothing on their own: such a tensor belongs to a weight that is not there.
constexpr std::array<std::string_view, 5> kOrphans = {
    ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__"};

class Lister {
 public:
  Lister(const Checkpoint& checkpoint, const json::Value* config)
      : checkpoint_(checkpoint), config_(config) {}

  std::vector<Weight> run() {
    for (const Spelling& spelling : spellings()) {
      for (const LocatedTensor& tensor : checkpoint_.tensors()) {
        if (!claimed_.contains(tensor.entry)) try_spelling(spelling, tensor);
      }
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
  void try_spelling(const Spelling& spelling, const LocatedTensor& tensor) {
    const std::string& name = tensor.entry->name;
    if (!name.ends_with(spelling.values)) return;
    const std::string stem = name.substr(0, name.size() - spelling.values.size());
    Weight weight;
    weight.name = stem + std::string(spelling.logical);
    weight.spelling = spelling.name;
    weight.format = spelling.format;
    weight.parts.push_back({"values", tensor});
    for (const PartName& part : spelling.parts) {
      if (part.suffix.empty()) continue;
      const LocatedTensor* found = checkpoint_.find(stem + std::string(part.suffix));
      if (found != nullptr && !claimed_.contains(found->entry)) {
        weight.parts.push_back({part.role, *found});
      } else if (part.required) {
        return;
      }
    }
    const Candidate candidate(config_, weight);
    if (!spelling.matches(candidate)) return;
    spelling.describe(candidate);
    for (const Part& part : weight.parts) {
      claimed_.insert(part.tensor.entry);
      weight.size_bytes += part.tensor.entry->size_bytes;
    }
    weights_.push_back(std::move(weight));
  }

  void add_plain(const LocatedTensor& tensor) {
    const std::string& name = tensor.entry->name;
    for (const std::string_view suffix : kOrphans) {
      const auto at = name.rfind(suffix);
      if (at == std::string::npos || at == 0) continue;
      // .quant_state.bitsandbytes__nf4: the suffix goes on.
      if (at + suffix.size() != name.size() && suffix.back() != '_') continue;
      throw Error(tensor.file->path().string() + ": tensor " + text::in_quotes(name) +
                  ": belongs to a bitsandbytes weight " + text::in_quotes(name.substr(0, at)) +
                  " that lacks values, absmax or "
                  "quant_state");
    }
    Weight weight;
    weight.name = name;
    weight.spelling = "plain";
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

template <class T>
float load_as_float(const std::uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return to_float(value);
}
template <>
float load_as_float<double>(const std::uint8_t* at) {
  double value;
  std::memcpy(&value, at, sizeof value);
  return static_cast<float>(value);
}

template <class From, class To>
void convert(const std::uint8_t* from, std::size_t count, To* out) {
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = from_float<To>(load_as_float<From>(from + i * sizeof(From)));
  }
}

template <class To>
void convert_from(StoredDType dtype, const std::uint8_t* bytes, std::uint64_t begin,
                  std::size_t count, To* out) {
  const std::uint8_t* from = bytes + begin * bits_of(dtype) / 8;
  if (dtype == stored(dtype_of<To>)) {
    std::memcpy(out, from, count * sizeof(To));
  } else if (dtype == StoredDType::kBF16) {
    convert<Bf16>(from, count, out);
  } else if (dtype == StoredDType::kF16) {
    convert<Fp16>(from, count, out);
  } else if (dtype == StoredDType::kF32) {
    convert<float>(from, count, out);
  } else {
    convert<double>(from, count, out);
  }
}

}  // namespace

bool Weight::is_readable() const {
  if (assembly) return assembly->is_readable();
  if (is_packed()) return view.has_value();
  return float_type(dtype).has_value() || dtype == StoredDType::kF64;
}

std::vector<Weight> list_weights(const Checkpoint& checkpoint, const json::Value* config) {
  return Lister(checkpoint, config).run();
}

void read_elements(const Weight& weight, std::uint64_t begin, std::uint64_t end, DType dtype,
                   void* out) {
  if (!weight.is_readable()) {
    throw Error(weight.parts.front().tensor.file->path().string() + ": weight " +
                text::in_quotes(weight.name) + ": cannot decode " + std::string(weight.format) +
                " (" + std::string(weight.spelling) + ")");
  }
  if (begin > end || end > weight.elements) {
    throw Error("weight " + text::in_quotes(weight.name) + ": elements " + std::to_string(begin) +
                " to " + std::to_string(end) + " wanted of " + std::to_string(weight.elements));
  }
  if (begin == end) return;
  if (weight.assembly) return read_assembled(weight, begin, end, dtype, out);
  if (!weight.view) {
    const std::uint8_t* bytes = weight.parts.front().tensor.bytes().data();
    with_type(dtype, [&]<class T>() {
      convert_from(weight.dtype, bytes, begin, end - begin, static_cast<T*>(out));
    });
    return;
  }
  const PackedView& view = *weight.view;
  DequantizeFn* decode = pick(dequantize_variants(), view.format);
  auto* to = static_cast<std::byte*>(out);
  while (begin < end) {
    const std::uint64_t row = begin / view.cols, first = begin % view.cols;
    const std::uint64_t count = std::min(view.cols - first, end - begin);
    decode(view, row, first, first + count, dtype, Stores::kCached, to);
    to += count * size_bytes(dtype);
    begin += count;
  }
}

DType source_dtype(const Weight& weight) {
  return float_type(weight.dtype).value_or(DType::kFloat32);
}

void read_values(const Weight& weight, std::uint64_t begin, std::uint64_t end, float* out) {
  if (!weight.is_packed() || source_dtype(weight) == DType::kFloat32) {
    return read_elements(weight, begin, end, DType::kFloat32, out);
  }
  with_type(source_dtype(weight), [&]<class T>() {
    std::vector<T> narrow(end - begin);
    read_elements(weight, begin, end, dtype_of<T>, narrow.data());
    for (std::size_t i = 0; i < narrow.size(); ++i) out[i] = to_float(narrow[i]);
  });
}

std::string_view layer_of(std::string_view name) {
  for (std::size_t begin = 0, end; begin < name.size(); begin = end + 1) {
    end = std::min(name.find('.', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    const bool digits = !part.empty() && std::all_of(part.begin(), part.end(),
                                                     [](char c) { return c >= '0' && c <= '9'; });
    if (digits && begin != 0 && end < name.size()) return name.substr(0, end);
  }
  return {};
}

StoredDType stored(DType dtype) {
  return dtype == DType::kFloat32    ? StoredDType::kF32
         : dtype == DType::kBFloat16 ? StoredDType::kBF16
                                     : StoredDType::kF16;
}

std::optional<DType> float_type(StoredDType dtype) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (stored(type) == dtype) return type;
  }
  return std::nullopt;
}

std::optional<DType> find_dtype(std::string_view name) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (short_name(stored(type)) == name) return type;
  }
  return std::nullopt;
}

std::string_view short_name(StoredDType dtype) {
  return kShortNames[static_cast<std::size_t>(dtype)];
}

}  // namespace monograph
