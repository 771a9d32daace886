#include "monograph/quant_methods/candidate.h"

#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/formats/bind.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using safetensors::LocatedTensor;
using safetensors::StoredDType;

std::string text_of(std::span<const std::uint64_t> shape) {
  std::string text = "[";
  for (const std::uint64_t dimension : shape) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(dimension);
  }
  return text + "]";
}

}  // namespace

const LocatedTensor* Candidate::part(std::string_view role) const {
  const auto found = std::find_if(weight_.parts.begin(), weight_.parts.end(),
                                  [&](const Part& part) { return part.role == role; });
  return found == weight_.parts.end() ? nullptr : &found->tensor;
}

StoredDType Candidate::dtype_of(std::string_view role) const {
  const LocatedTensor* found = part(role);
  return found == nullptr ? StoredDType::kBool : found->entry->dtype;
}

const std::vector<std::uint64_t>& Candidate::shape_of(std::string_view role) const {
  return part(role)->entry->shape;
}

bool Candidate::scale_is_e8m0() const {
  const StoredDType dtype = dtype_of("scale");
  return dtype == StoredDType::kU8 || dtype == StoredDType::kF8E8M0;
}

void Candidate::set_shape(std::vector<std::uint64_t> shape,
                          std::vector<std::uint64_t> block) const {
  weight_.elements = 1;
  // No overflow: at most twice the elements of the values, which are in the file.
  for (const std::uint64_t dimension : shape) weight_.elements *= dimension;
  weight_.shape = std::move(shape);
  weight_.block = std::move(block);
}

void Candidate::bind(Format format, std::initializer_list<std::string_view> scale_roles) const {
  const auto bytes_of = [&](std::string_view role) {
    const auto bytes = part(role)->bytes();
    return ByteSpan{bytes.data(), bytes.size()};
  };
  std::vector<ByteSpan> scales;
  for (const std::string_view role : scale_roles) scales.push_back(bytes_of(role));
  const std::vector<std::size_t> shape(weight_.shape.begin(), weight_.shape.end());
  try {
    weight_.view =
        bind_packed(*find_format(format), weight_.block.back(), shape, bytes_of("values"), scales);
  } catch (const Error& error) {
    fail(error.what());
  }
}

void Candidate::fail(const std::string& what) const {
  const LocatedTensor& values = weight_.parts.front().tensor;
  throw Error(values.file->path().string() + ": weight " + text::in_quotes(weight_.name) + " (" +
              std::string(weight_.quant_method) + " " + std::string(weight_.format) + "): " + what);
}

void Candidate::want_shape(std::string_view role, std::span<const std::uint64_t> shape) const {
  const std::vector<std::uint64_t>& found = part(role)->entry->shape;
  if (std::equal(found.begin(), found.end(), shape.begin(), shape.end())) return;
  fail(std::string(role) + " has the shape " + text_of(found) + ", wanted " + text_of(shape));
}

void Candidate::want_dtype(std::string_view role, StoredDType dtype) const {
  const StoredDType found = part(role)->entry->dtype;
  if (found == dtype) return;
  fail(std::string(role) + " is " + std::string(name_of(found)) + ", wanted " +
       std::string(name_of(dtype)));
}

}  // namespace monograph
