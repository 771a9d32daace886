#include "monograph/weights/weight.h"

#include <algorithm>
#include <array>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/composed_weight.h"

namespace monograph {
namespace {

using safetensors::StoredDType;

constexpr std::array<std::string_view, 22> kShortNames = {
    "bool",    "f4",          "f6_e2m3",     "f6_e3m2", "u8",  "i8",   "f8_e5m2", "f8_e4m3",
    "f8_e8m0", "f8_e4m3fnuz", "f8_e5m2fnuz", "i16",     "u16", "fp16", "bf16",    "i32",
    "u32",     "fp32",        "c64",         "fp64",    "i64", "u64"};
static_assert(kShortNames[static_cast<std::size_t>(StoredDType::kU64)] == "u64");
static_assert(kShortNames[static_cast<std::size_t>(StoredDType::kBF16)] == "bf16");

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

// Columns [first, first + count) of a row whose columns are stored in another order.
template <class T>
void read_columns(const Weight& weight, DequantizeFn* decode, std::uint64_t row,
                  std::uint64_t first, std::uint64_t count, T* out) {
  const PackedView& view = *weight.view;
  std::vector<T> stored_row(view.cols);
  decode(view, row, 0, view.cols, dtype_of<T>, Stores::kCached, stored_row.data());
  for (std::uint64_t i = 0; i < view.cols; ++i) {
    const std::uint64_t column = weight.columns[i];
    if (column >= first && column - first < count) out[column - first] = stored_row[i];
  }
}

void read_source(const ElementSource& source, std::uint64_t begin, std::uint64_t end, DType dtype,
                 void* out) {
  if (dtype == DType::kFloat32) return source.read(begin, end, static_cast<float*>(out));
  std::vector<float> values(end - begin);
  source.read(begin, end, values.data());
  with_type(dtype, [&]<class T>() {
    auto* to = static_cast<T*>(out);
    for (std::size_t i = 0; i < values.size(); ++i) to[i] = from_float<T>(values[i]);
  });
}

}  // namespace

bool Weight::is_readable() const {
  if (composed) return composed->is_readable();
  if (source) return true;
  if (is_packed()) return view.has_value();
  return float_type(dtype).has_value() || dtype == StoredDType::kF64;
}

void read_elements(const Weight& weight, std::uint64_t begin, std::uint64_t end, DType dtype,
                   void* out) {
  if (!weight.is_readable()) {
    throw Error(weight.parts.front().tensor.file->path().string() + ": weight " +
                text::in_quotes(weight.name) + ": cannot decode " + std::string(weight.format) +
                " (" + std::string(weight.quant_method) + ")");
  }
  if (begin > end || end > weight.elements) {
    throw Error("weight " + text::in_quotes(weight.name) + ": elements " + std::to_string(begin) +
                " to " + std::to_string(end) + " wanted of " + std::to_string(weight.elements));
  }
  if (begin == end) return;
  if (weight.composed) return read_composed(weight, begin, end, dtype, out);
  if (weight.source) return read_source(*weight.source, begin, end, dtype, out);
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
    if (weight.columns.empty()) {
      decode(view, row, first, first + count, dtype, Stores::kCached, to);
    } else {
      with_type(dtype, [&]<class T>() {
        read_columns(weight, decode, row, first, count, reinterpret_cast<T*>(to));
      });
    }
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
