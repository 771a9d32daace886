#include "monograph/quant_methods/quant_state.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "monograph/base/error.h"
#include "monograph/formats/packed_view.h"
#include "monograph/safetensors/checked_size.h"
#include "monograph/safetensors/header.h"
#include "monograph/text/json_document.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using safetensors::checked_mul;
using text::in_quotes;

constexpr std::array kDTypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr std::array<std::string_view, 7> kKeys = {
    "quant_type",       "blocksize",    "dtype",        "shape",
    "nested_blocksize", "nested_dtype", "nested_offset"};
// "-1.1754943508222875e-38" and one to spare.
constexpr std::size_t kOffsetChars = 24;

class Checker {
 public:
  Checker(const json::Value& object, std::string_view source) : object_(object), source_(source) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(std::string(source_) + ": quant_state: " + what);
  }
  const json::Value& member(std::string_view key) const {
    const json::Value* value = object_.find(key);
    if (value == nullptr) fail(std::string(key) + " is missing");
    return *value;
  }
  std::string_view string(std::string_view key) const {
    const auto text = member(key).as_string();
    if (!text) fail(std::string(key) + " must be a string");
    return *text;
  }
  std::uint64_t whole(const json::Value& value, std::string_view what) const {
    const auto number = value.as_unsigned();
    if (!number) fail(std::string(what) + " must be a whole number");
    return *number;
  }
  bool has(std::string_view key) const { return object_.find(key) != nullptr; }

 private:
  const json::Value& object_;
  std::string_view source_;
};

void read_shape(const Checker& check, QuantState& state) {
  const json::Value& shape = check.member("shape");
  if (!shape.is(json::Kind::kArray)) check.fail("shape must be an array");
  const std::size_t rank = shape.items().size();
  if (rank == 0 || rank > safetensors::kMaxRank) {
    check.fail("shape has " + std::to_string(rank) + " dimensions, wanted 1 to " +
               std::to_string(safetensors::kMaxRank));
  }
  // As in a header: over the dimensions that are not zero, so that no part can overflow either.
  std::optional<std::uint64_t> product = 1;
  bool empty = false;
  for (const json::Value& item : shape.items()) {
    const std::uint64_t dimension = check.whole(item, "shape");
    state.shape.push_back(dimension);
    if (dimension == 0) {
      empty = true;
    } else if (product) {
      product = checked_mul(*product, dimension);
    }
  }
  // Room for every size that is computed from it: a fp32 an element.
  if (!product || *product > UINT64_MAX / 8) check.fail("the product of shape overflows");
  state.elements = empty ? 0 : *product;
}

void read_nested(const Checker& check, QuantState& state) {
  const bool size = check.has("nested_blocksize"), dtype = check.has("nested_dtype"),
             offset = check.has("nested_offset");
  if (size != dtype || size != offset) {
    check.fail("has some of nested_blocksize, nested_dtype and nested_offset, wanted all or none");
  }
  state.nested = size;
  if (!size) return;
  const std::uint64_t group = check.whole(check.member("nested_blocksize"), "nested_blocksize");
  if (group != kScaleGroup) {
    check.fail("nested_blocksize is " + std::to_string(group) + ", wanted " +
               std::to_string(kScaleGroup));
  }
  if (const auto found = check.string("nested_dtype"); found != "float32") {
    check.fail("nested_dtype is " + in_quotes(found) + ", wanted 'float32'");
  }
  const auto number = check.member("nested_offset").as_double();
  if (!number || !std::isfinite(*number) || !std::isfinite(static_cast<float>(*number))) {
    check.fail("nested_offset must be a finite fp32 number");
  }
  state.offset = static_cast<float>(*number);
}

}  // namespace

QuantState parse_quant_state(std::string_view text, Format format, std::string_view source) {
  if (text.size() > kMaxQuantStateBytes) {
    throw Error(std::string(source) + ": quant_state has " + std::to_string(text.size()) +
                " bytes, at most " + std::to_string(kMaxQuantStateBytes) + " are allowed");
  }
  const json::Value object = json::parse(text, std::string(source) + ": quant_state");
  const Checker check(object, source);
  if (!object.is(json::Kind::kObject)) check.fail("must be an object");
  for (const json::Member& member : object.members()) {
    if (std::find(kKeys.begin(), kKeys.end(), member.key) == kKeys.end()) {
      check.fail("unknown key " + in_quotes(member.key));
    }
  }
  QuantState state;
  state.format = format;
  const FormatInfo& info = *find_format(format);
  if (const auto found = check.string("quant_type"); found != info.name) {
    check.fail("quant_type is " + in_quotes(found) + ", the name of the tensor says '" + info.name +
               "'");
  }
  const std::uint64_t block = check.whole(check.member("blocksize"), "blocksize");
  if (!block_fits(info, block)) {
    check.fail("blocksize is " + std::to_string(block) + ", wanted a power of two from " +
               std::to_string(info.smallest_block) + " to " + std::to_string(info.largest_block));
  }
  state.block = block;
  const std::string_view dtype = check.string("dtype");
  const auto known =
      std::find_if(kDTypes.begin(), kDTypes.end(), [&](DType d) { return dtype == name_of(d); });
  if (known == kDTypes.end()) {
    check.fail("dtype is " + in_quotes(dtype) + ", wanted float32, bfloat16 or float16");
  }
  state.dtype = *known;
  read_shape(check, state);
  read_nested(check, state);
  return state;
}

std::string quant_state_text(const QuantState& state) {
  json::Value object = json::Value::object();
  object.set("quant_type", json::Value::string(find_format(state.format)->name));
  object.set("blocksize", json::Value::number(static_cast<std::int64_t>(state.block)));
  object.set("dtype", json::Value::string(name_of(state.dtype)));
  json::Value& shape = object.set("shape", json::Value::array());
  for (const std::uint64_t dimension : state.shape) {
    shape.append(json::Value::number(static_cast<std::int64_t>(dimension)));
  }
  if (!state.nested) return json::dump_line(object);
  object.set("nested_blocksize", json::Value::number(static_cast<std::int64_t>(kScaleGroup)));
  object.set("nested_dtype", json::Value::string("float32"));
  const json::Value offset = json::Value::number(static_cast<double>(state.offset));
  const std::size_t blanks = kOffsetChars - std::min(kOffsetChars, offset.text().size());
  object.set("nested_offset", offset);
  return json::dump_line(object) + std::string(blanks, ' ');
}

}  // namespace monograph
