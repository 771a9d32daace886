#include "monograph/safetensors/header.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/safetensors/checked_size.h"
#include "monograph/text/json_scanner.h"
#include "monograph/text/utf8.h"

namespace monograph::safetensors {
namespace {

using text::find_duplicate;
using text::in_quotes;
using text::JsonScanner;

// `"":{"dtype":"U8","shape":[],"data_offsets":[0,0]},`
constexpr std::size_t kShortestEntryBytes = 50;

// What one entry of the JSON says, in 40 bytes whatever its shape: until every rule holds, a header
// costs less memory than its own text. The shape is read again from `shape_position` afterwards.
struct Record {
  std::string_view name;
  std::uint64_t begin = 0, end = 0;  // from the start of the data
  std::uint32_t shape_position = 0;
  StoredDType dtype = StoredDType::kU8;
};

struct MetadataPair {
  std::string_view key;
  std::uint32_t value_position = 0;
};

std::string number(std::uint64_t value) { return std::to_string(value); }

class Parser {
 public:
  Parser(std::string_view json, std::uint64_t data_bytes, std::string_view source)
      : json_(json), source_(source), data_bytes_(data_bytes), scanner_(json, source) {}

  void scan();
  void check_duplicates() const;
  void check_layout();  // sorts the records by their offsets
  Header build() const;

 private:
  [[noreturn]] void fail(std::string_view tensor, const std::string& what) const {
    throw Error(std::string(source_) + ": tensor " + in_quotes(tensor) + ": " + what);
  }
  void scan_metadata();
  void scan_entry(std::string_view name);
  std::uint64_t scan_shape(std::string_view name);
  void scan_offsets(Record& record);
  void check_size(const Record& record, std::uint64_t elements) const;

  std::string_view json_, source_;
  std::uint64_t data_bytes_;
  JsonScanner scanner_;
  std::vector<Record> records_;
  std::vector<MetadataPair> metadata_;
  bool has_metadata_ = false;
};

void Parser::scan() {
  if (scanner_.peek() != '{') scanner_.fail("a header is one JSON object and begins with '{'");
  // Address space only: pages that no record reaches are never touched.
  records_.reserve(std::min(kMaxTensors, json_.size() / kShortestEntryBytes + 1));
  scanner_.object([this](std::string_view key) {
    if (key == kMetadataKey) {
      scan_metadata();
    } else {
      scan_entry(key);
    }
  });
  scanner_.expect_end();
}

void Parser::scan_metadata() {
  if (has_metadata_) scanner_.fail("duplicate key '__metadata__'");
  has_metadata_ = true;
  if (scanner_.peek() != '{') scanner_.fail("__metadata__ must be an object of strings");
  scanner_.object([this](std::string_view key) {
    if (metadata_.size() == kMaxMetadataPairs) {
      scanner_.fail("__metadata__ has more than " + number(kMaxMetadataPairs) + " pairs");
    }
    if (scanner_.peek() != '"') {
      scanner_.fail("__metadata__ key " + in_quotes(key) + ": the value must be a string");
    }
    metadata_.push_back({key, static_cast<std::uint32_t>(scanner_.position())});
    scanner_.skip_string();
  });
}

void Parser::scan_entry(std::string_view name) {
  if (records_.size() == kMaxTensors) {
    scanner_.fail("more than " + number(kMaxTensors) + " tensors");
  }
  if (scanner_.peek() != '{') fail(name, "the entry must be an object");
  Record record{.name = name};
  scanner_.set_subject("tensor", name);
  std::uint64_t elements = 0;
  bool has_dtype = false, has_shape = false, has_offsets = false;
  const auto once = [&](bool& seen, std::string_view key) {
    if (std::exchange(seen, true)) fail(name, "duplicate key " + in_quotes(key));
  };
  scanner_.object([&](std::string_view key) {
    if (key == "dtype") {
      once(has_dtype, key);
      if (scanner_.peek() != '"') fail(name, "dtype must be a string");
      const std::string_view found = scanner_.string();
      const std::optional<StoredDType> dtype = find_stored_dtype(found);
      if (!dtype) fail(name, "dtype " + in_quotes(found) + " is not one of the 22 known");
      record.dtype = *dtype;
    } else if (key == "shape") {
      once(has_shape, key);
      record.shape_position = static_cast<std::uint32_t>(scanner_.position());
      elements = scan_shape(name);
    } else if (key == "data_offsets") {
      once(has_offsets, key);
      scan_offsets(record);
    } else {
      fail(name, "unknown key " + in_quotes(key) + ", wanted dtype, shape and data_offsets only");
    }
  });
  scanner_.set_subject({}, {});
  if (!has_dtype) fail(name, "dtype is missing");
  if (!has_shape) fail(name, "shape is missing");
  if (!has_offsets) fail(name, "data_offsets is missing");
  check_size(record, elements);
  records_.push_back(record);
}

// The number of elements.
std::uint64_t Parser::scan_shape(std::string_view name) {
  if (scanner_.peek() != '[') fail(name, "shape must be an array");
  std::size_t rank = 0;
  bool empty = false;
  // Over the dimensions that are not zero, so that no part of a shape can overflow either: the Rust
  // reader accepts [0, 2^63, 2^63].
  std::uint64_t product = 1;
  scanner_.array([&] {
    const std::uint64_t dimension = scanner_.unsigned_integer();
    if (++rank > kMaxRank) fail(name, "shape has more than " + number(kMaxRank) + " dimensions");
    if (dimension == 0) {
      empty = true;
      return;
    }
    const std::optional<std::uint64_t> next = checked_mul(product, dimension);
    if (!next) fail(name, "the product of shape overflows 64 bits");
    product = *next;
  });
  // 64 is the widest dtype: the product in bits fits as well, whatever dtype stands next to it.
  if (empty && !checked_mul(product, 64)) fail(name, "the product of shape overflows 64 bits");
  return empty ? 0 : product;
}

void Parser::scan_offsets(Record& record) {
  if (scanner_.peek() != '[') fail(record.name, "data_offsets must be an array");
  std::array<std::uint64_t, 2> offsets{};
  std::size_t count = 0;
  scanner_.array([&] {
    const std::uint64_t offset = scanner_.unsigned_integer();
    if (count < 2) offsets[count] = offset;
    if (++count > 2) fail(record.name, "data_offsets has more than 2 numbers");
  });
  if (count != 2) fail(record.name, "data_offsets has " + number(count) + " numbers, wanted 2");
  record.begin = offsets[0];
  record.end = offsets[1];
  if (record.end < record.begin) {
    fail(record.name, "data_offsets end at " + number(record.end) + ", before their begin at " +
                          number(record.begin));
  }
  if (record.end > data_bytes_) {
    fail(record.name, "data_offsets end at byte " + number(record.end) + ", the file has only " +
                          number(data_bytes_) + " bytes of data");
  }
}

void Parser::check_size(const Record& record, std::uint64_t elements) const {
  const std::uint32_t bits = bits_of(record.dtype);
  const std::optional<std::uint64_t> total_bits = checked_mul(elements, bits);
  if (!total_bits) fail(record.name, "shape times dtype overflows 64 bits");
  if (*total_bits % 8 != 0) {
    fail(record.name, number(elements) + " elements of " + number(bits) +
                          " bits are not a whole number of bytes");
  }
  if (*total_bits / 8 != record.end - record.begin) {
    fail(record.name, "data_offsets span " + number(record.end - record.begin) +
                          " bytes, shape and dtype need " + number(*total_bits / 8));
  }
}

void Parser::check_duplicates() const {
  const auto tensor = [this](std::size_t i) { return records_[i].name; };
  if (const auto name = find_duplicate(records_.size(), tensor)) {
    fail(*name, "the name occurs twice");
  }
  const auto metadata = [this](std::size_t i) { return metadata_[i].key; };
  if (const auto key = find_duplicate(metadata_.size(), metadata)) {
    throw Error(std::string(source_) + ": __metadata__: duplicate key " + in_quotes(*key));
  }
}

void Parser::check_layout() {
  std::sort(records_.begin(), records_.end(), [](const Record& a, const Record& b) {
    if (a.begin != b.begin) return a.begin < b.begin;
    return a.end != b.end ? a.end < b.end : a.name < b.name;
  });
  std::uint64_t expected = 0;
  std::string_view before;
  for (const Record& record : records_) {
    if (record.begin < expected) {
      fail(record.name, "begins at byte " + number(record.begin) + " and overlaps with " +
                            in_quotes(before) + ", which ends at " + number(expected));
    }
    if (record.begin > expected) {
      fail(record.name, "begins at byte " + number(record.begin) + " and leaves a hole, wanted " +
                            number(expected));
    }
    expected = record.end;
    before = record.name;
  }
  if (expected != data_bytes_) {
    throw Error(std::string(source_) + ": the tensors end at byte " + number(expected) +
                " of the data, the file holds " + number(data_bytes_) + " bytes of data");
  }
}

Header Parser::build() const {
  Header header;
  header.tensors.reserve(records_.size());
  for (const Record& record : records_) {
    TensorEntry entry;
    entry.name = record.name;
    entry.dtype = record.dtype;
    JsonScanner scanner(json_.substr(record.shape_position), source_);
    scanner.array([&] { entry.shape.push_back(scanner.unsigned_integer()); });
    entry.offset_bytes = record.begin;
    entry.size_bytes = record.end - record.begin;
    entry.elements = entry.size_bytes * 8 / bits_of(record.dtype);
    header.tensors.push_back(std::move(entry));
  }
  for (const MetadataPair& pair : metadata_) {
    JsonScanner scanner(json_.substr(pair.value_position), source_);
    header.metadata.emplace(pair.key, scanner.string());
  }
  header.by_name.resize(header.tensors.size());
  for (std::size_t i = 0; i < header.by_name.size(); ++i) {
    header.by_name[i] = static_cast<std::uint32_t>(i);
  }
  std::sort(header.by_name.begin(), header.by_name.end(), [&](std::uint32_t a, std::uint32_t b) {
    return header.tensors[a].name < header.tensors[b].name;
  });
  return header;
}

}  // namespace

const TensorEntry* Header::find(std::string_view name) const {
  const auto found = std::lower_bound(
      by_name.begin(), by_name.end(), name,
      [this](std::uint32_t i, std::string_view wanted) { return tensors[i].name < wanted; });
  if (found == by_name.end() || tensors[*found].name != name) return nullptr;
  return &tensors[*found];
}

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text;
  for (const std::uint64_t size : shape) {
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  }
  return "[" + text + "]";
}

Header parse_header(std::span<const std::uint8_t> bytes, std::uint64_t file_size_bytes,
                    std::string_view source) {
  const auto fail = [source](const std::string& what) {
    throw Error(std::string(source) + ": " + what);
  };
  if (file_size_bytes < kLengthBytes || bytes.size() < kLengthBytes) {
    fail("the file has " + number(file_size_bytes) + " bytes, a header needs at least 8");
  }
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length |= static_cast<std::uint64_t>(bytes[i]) << (8 * i);
  }
  if (length > kMaxHeaderBytes) {
    fail("the header claims " + number(length) + " bytes, at most " + number(kMaxHeaderBytes) +
         " are allowed");
  }
  const std::uint64_t data_offset = kLengthBytes + length;  // <= 8 + kMaxHeaderBytes
  if (data_offset > file_size_bytes || data_offset > bytes.size()) {
    fail("the header claims " + number(length) + " bytes after the first 8, the file has " +
         number(file_size_bytes));
  }
  const std::string_view json(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length);
  Parser parser(json, file_size_bytes - data_offset, source);
  parser.scan();
  parser.check_duplicates();
  parser.check_layout();
  Header header = parser.build();
  header.data_offset_bytes = data_offset;
  for (TensorEntry& entry : header.tensors) entry.offset_bytes += data_offset;
  return header;
}

}  // namespace monograph::safetensors
