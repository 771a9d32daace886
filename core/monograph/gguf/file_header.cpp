#include "monograph/gguf/file_header.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <set>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using text::in_quotes;

constexpr std::string_view kMagic = "GGUF";
constexpr std::uint64_t kMaxAlignment = 1 << 20;
constexpr std::array<std::string_view, 13> kValueNames = {
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"};
// Bytes of a number; 0 for what has no fixed size.
constexpr std::array<std::uint64_t, 13> kValueBytes = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

std::uint64_t bytes_of(ValueType type) { return kValueBytes[static_cast<std::size_t>(type)]; }

class Parser {
 public:
  Parser(std::span<const std::uint8_t> bytes, std::string_view source)
      : bytes_(bytes), source_(source) {}

  FileHeader parse() {
    begin();
    for (std::uint64_t i = 0; i < pairs_; ++i) header_.pairs.push_back(pair());
    read_alignment();
    for (std::uint64_t i = 0; i < tensors_; ++i) header_.tensors.push_back(tensor());
    header_.data_offset_bytes = aligned(place_);
    check_layout();
    return std::move(header_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(std::string(source_) + ": " + what);
  }

  std::span<const std::uint8_t> take(std::uint64_t count, const char* what) {
    if (count > bytes_.size() - place_) {
      fail(std::string(what) + " at byte " + std::to_string(place_) + " takes " +
           std::to_string(count) + " bytes, the file has " +
           std::to_string(bytes_.size() - place_) + " more");
    }
    const auto found = bytes_.subspan(place_, count);
    place_ += count;
    return found;
  }

  template <class T>
  T read(const char* what) {
    T value;
    std::memcpy(&value, take(sizeof value, what).data(), sizeof value);
    return value;
  }

  std::string_view string(const char* what, std::uint64_t most) {
    const auto length = read<std::uint64_t>(what);
    if (length > most) {
      fail(std::string(what) + " at byte " + std::to_string(place_) + " is " +
           std::to_string(length) + " bytes long, at most " + std::to_string(most) +
           " are allowed");
    }
    const auto found = take(length, what);
    return {reinterpret_cast<const char*>(found.data()), found.size()};
  }

  std::string_view name(const char* what, std::uint64_t most) {
    const std::string_view found = string(what, most);
    if (!text::is_utf8(found)) fail(std::string(what) + " " + in_quotes(found) + " is no UTF-8");
    return found;
  }

  void begin() {
    const auto magic = take(kMagic.size(), "magic");
    if (!std::equal(magic.begin(), magic.end(), kMagic.begin())) {
      fail("begins with other bytes than \"GGUF\"");
    }
    header_.version = read<std::uint32_t>("version");
    if (header_.version != 2 && header_.version != 3) {
      const std::uint32_t turned = __builtin_bswap32(header_.version);
      fail(turned == 2 || turned == 3
               ? "is big endian, wanted little endian"
               : "version " + std::to_string(header_.version) + ", wanted 2 or 3");
    }
    tensors_ = read<std::uint64_t>("number of tensors");
    pairs_ = read<std::uint64_t>("number of pairs");
    if (tensors_ > kMaxTensors || pairs_ > kMaxPairs) {
      fail(std::to_string(tensors_) + " tensors and " + std::to_string(pairs_) +
           " pairs, at most " + std::to_string(kMaxTensors) + " of each are allowed");
    }
  }

  ValueType value_type(std::string_view key) {
    const auto found = read<std::uint32_t>("type of a value");
    if (found >= kValueNames.size()) {
      fail("pair " + in_quotes(key) + ": type " + std::to_string(found) +
           " of a value, wanted 0 to " + std::to_string(kValueNames.size() - 1));
    }
    return static_cast<ValueType>(found);
  }

  PairView pair() {
    PairView pair;
    pair.key = name("key", kMaxKeyBytes);
    if (pair.key.empty()) fail("a pair has an empty key");
    if (!keys_.insert(pair.key).second) fail("pair " + in_quotes(pair.key) + " is there twice");
    pair.type = value_type(pair.key);
    if (pair.type == ValueType::kArray) {
      pair.element = value_type(pair.key);
      if (pair.element == ValueType::kArray) {
        fail("pair " + in_quotes(pair.key) + " is an array of arrays, which ggml has not");
      }
      pair.count = read<std::uint64_t>("length of an array");
      pair.bytes = array(pair);
    } else if (pair.type == ValueType::kString) {
      const std::string_view text = string("text", bytes_.size());
      pair.bytes = {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
    } else {
      pair.bytes = take(bytes_of(pair.type), "value");
    }
    return pair;
  }

  std::span<const std::uint8_t> array(const PairView& pair) {
    const std::uint64_t left = bytes_.size() - place_;
    const std::uint64_t least = pair.element == ValueType::kString ? 8 : bytes_of(pair.element);
    if (pair.count > left / least) {
      fail("pair " + in_quotes(pair.key) + ": " + std::to_string(pair.count) +
           " values of at least " + std::to_string(least) + " bytes, the file has " +
           std::to_string(left) + " more");
    }
    if (pair.element != ValueType::kString) return take(pair.count * least, "array");
    const std::uint64_t begin = place_;
    for (std::uint64_t i = 0; i < pair.count; ++i) string("text of an array", bytes_.size());
    return bytes_.subspan(begin, place_ - begin);
  }

  void read_alignment() {
    const PairView* pair = header_.find("general.alignment");
    if (pair == nullptr) return;
    const std::optional<std::uint64_t> found = pair->whole();
    if (!found || !std::has_single_bit(*found) || *found > kMaxAlignment) {
      fail("general.alignment is " + (found ? std::to_string(*found) : "no whole number") +
           ", wanted a power of two up to " + std::to_string(kMaxAlignment));
    }
    header_.alignment = *found;
  }

  std::uint64_t aligned(std::uint64_t place) const {
    return (place + header_.alignment - 1) / header_.alignment * header_.alignment;
  }

  TensorInfo tensor() {
    TensorInfo info;
    info.name = name("name of a tensor", kMaxNameBytes);
    const std::string shown = "tensor " + in_quotes(info.name) + ": ";
    const auto dimensions = read<std::uint32_t>("number of dimensions");
    if (dimensions == 0 || dimensions > kMaxDimensions) {
      fail(shown + std::to_string(dimensions) + " dimensions, wanted 1 to " +
           std::to_string(kMaxDimensions));
    }
    std::uint64_t elements = 1;
    for (std::uint32_t i = 0; i < dimensions; ++i) {
      const auto size = read<std::uint64_t>("dimension");
      if (size == 0 || __builtin_mul_overflow(elements, size, &elements) || elements >> 56 != 0) {
        fail(shown + "dimension " + std::to_string(size) + " is 0 or makes too many elements");
      }
      info.shape.insert(info.shape.begin(), size);
    }
    const auto number = read<std::uint32_t>("type of a tensor");
    const TensorTypeInfo* type = find_tensor_type(number);
    if (type == nullptr) {
      std::string known;
      for (const TensorTypeInfo& row : kTensorTypes) {
        known += (known.empty() ? "" : ", ") + std::string(row.name);
      }
      fail(shown + "type " + std::to_string(number) + " (" + std::string(unread_name(number)) +
           ") is not read, wanted " + known);
    }
    info.type = type->type;
    if (info.shape.back() % type->block_elements != 0) {
      fail(shown + "rows of " + std::to_string(info.shape.back()) + ", wanted a multiple of " +
           std::to_string(type->block_elements) + " for " + std::string(type->name));
    }
    info.size_bytes = size_bytes(info.type, elements);
    info.offset_bytes = read<std::uint64_t>("offset of a tensor");
    return info;
  }

  void check_layout() const {
    std::set<std::string_view> names;
    std::uint64_t next = 0, end = header_.data_offset_bytes;
    for (const TensorInfo& info : header_.tensors) {
      const std::string shown = "tensor " + in_quotes(info.name) + ": ";
      if (!names.insert(info.name).second) fail(shown + "is there twice");
      if (info.offset_bytes != next) {
        fail(shown + "begins at byte " + std::to_string(info.offset_bytes) +
             " of the data, wanted " + std::to_string(next) + ", where the one before ends");
      }
      // 2^20 tensors of 2^58 bytes would overflow; none is beyond the file.
      end = header_.data_offset_bytes + next + info.size_bytes;
      if (end > bytes_.size()) {
        fail(shown + "ends at byte " + std::to_string(end) + ", the file has " +
             std::to_string(bytes_.size()));
      }
      next = aligned(next + info.size_bytes);
    }
    if (bytes_.size() > aligned(end)) {
      fail(std::to_string(bytes_.size() - aligned(end)) + " bytes behind the last tensor");
    }
  }

  std::span<const std::uint8_t> bytes_;
  std::string_view source_;
  std::uint64_t place_ = 0, tensors_ = 0, pairs_ = 0;
  std::set<std::string_view> keys_;
  FileHeader header_;
};

template <class T>
T value_at(std::span<const std::uint8_t> bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

std::optional<std::int64_t> signed_whole(const PairView& pair) {
  switch (pair.type) {
    case ValueType::kU8:
      return value_at<std::uint8_t>(pair.bytes);
    case ValueType::kI8:
      return value_at<std::int8_t>(pair.bytes);
    case ValueType::kU16:
      return value_at<std::uint16_t>(pair.bytes);
    case ValueType::kI16:
      return value_at<std::int16_t>(pair.bytes);
    case ValueType::kU32:
      return value_at<std::uint32_t>(pair.bytes);
    case ValueType::kI32:
      return value_at<std::int32_t>(pair.bytes);
    case ValueType::kI64:
      return value_at<std::int64_t>(pair.bytes);
    default:
      return std::nullopt;
  }
}

}  // namespace

std::string_view name_of(ValueType type) { return kValueNames[static_cast<std::size_t>(type)]; }

std::optional<std::uint64_t> PairView::whole() const {
  if (type == ValueType::kU64) return value_at<std::uint64_t>(bytes);
  const std::optional<std::int64_t> found = signed_whole(*this);
  if (!found || *found < 0) return std::nullopt;
  return static_cast<std::uint64_t>(*found);
}

std::optional<double> PairView::number() const {
  if (type == ValueType::kF32) return value_at<float>(bytes);
  if (type == ValueType::kF64) return value_at<double>(bytes);
  if (type == ValueType::kU64) return static_cast<double>(value_at<std::uint64_t>(bytes));
  const std::optional<std::int64_t> found = signed_whole(*this);
  if (!found) return std::nullopt;
  return static_cast<double>(*found);
}

std::optional<std::string_view> PairView::text() const {
  if (type != ValueType::kString) return std::nullopt;
  return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

const PairView* FileHeader::find(std::string_view key) const {
  const auto found = std::find_if(pairs.begin(), pairs.end(),
                                  [&](const PairView& pair) { return pair.key == key; });
  return found == pairs.end() ? nullptr : &*found;
}

std::string_view FileHeader::architecture() const {
  const PairView* pair = find("general.architecture");
  return pair == nullptr ? std::string_view() : pair->text().value_or("");
}

const TensorInfo* FileHeader::find_tensor(std::string_view name) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&](const TensorInfo& info) { return info.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

FileHeader parse_file_header(std::span<const std::uint8_t> bytes, std::string_view source) {
  return Parser(bytes, source).parse();
}

}  // namespace monograph::gguf
