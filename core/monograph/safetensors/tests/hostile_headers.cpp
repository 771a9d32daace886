#include <cstdint>
#include <fstream>

#include "monograph/safetensors/header.h"
#include "monograph/safetensors/tests/hostile_files.h"

namespace monograph::safetensors {
namespace {

std::string length_bytes(std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xff);
  return bytes;
}

class Cases {
 public:
  void add(const std::string& name, const std::string& rule, std::function<std::string()> bytes) {
    const auto make = [bytes = std::move(bytes)] {
      return std::vector<HostileFile>{{"model.safetensors", bytes()}};
    };
    cases_.push_back({name, rule, "model.safetensors", make});
  }
  void json(const std::string& name, const std::string& rule, const std::string& json,
            std::size_t data_bytes = 0) {
    add(name, rule, [=] { return file_bytes(json, data_bytes); });
  }
  // One tensor "a": the members of its entry, and 4 bytes of data.
  void entry(const std::string& name, const std::string& rule, const std::string& members) {
    json(name, "tensor 'a': " + rule, "{\"a\":{" + members + "}}", 4);
  }
  void shape(const std::string& name, const std::string& rule, const std::string& shape,
             const std::string& dtype = "U8") {
    json(name, rule,
         R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":[0,4]}})", 4);
  }
  void offsets(const std::string& name, const std::string& rule, const std::string& offsets) {
    json(name, rule, R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + offsets + "}}", 4);
  }
  std::vector<HostileCase> take() { return std::move(cases_); }

 private:
  std::vector<HostileCase> cases_;
};

// {"a": 4 bytes from a_begin, "b": 4 bytes from b_begin}
std::string two_tensors(int a_begin, int b_begin) {
  const auto entry = [](int begin) {
    return R"({"dtype":"U8","shape":[4],"data_offsets":[)" + std::to_string(begin) + "," +
           std::to_string(begin + 4) + "]}";
  };
  return R"({"a":)" + entry(a_begin) + R"(,"b":)" + entry(b_begin) + "}";
}

void add_lengths(Cases& cases) {
  cases.add("empty_file", "a header needs at least 8", [] { return std::string(); });
  cases.add("seven_bytes", "a header needs at least 8", [] { return std::string(7, '\0'); });
  cases.add("length_zero", "begins with '{'", [] { return std::string(8, '\0'); });
  cases.add("length_past_the_end", "the header claims 1000 bytes",
            [] { return length_bytes(1000) + "{}"; });
  cases.add("length_one_past_the_end", "the header claims 3 bytes",
            [] { return length_bytes(3) + "{}"; });
  cases.add("length_over_the_cap", "at most 100000000 are allowed",
            [] { return length_bytes(kMaxHeaderBytes + 1) + "{}"; });
  cases.add("length_2_to_63", "at most 100000000 are allowed",
            [] { return length_bytes(std::uint64_t{1} << 63) + "{}"; });
  cases.add("length_that_wraps", "at most 100000000 are allowed",
            [] { return length_bytes(UINT64_MAX - 7) + "{}"; });
  cases.add("length_all_ones", "at most 100000000 are allowed",
            [] { return length_bytes(UINT64_MAX) + "{}"; });
}

void add_100_megabytes(Cases& cases) {
  cases.add("blanks_100_mb", "found the end", [] {
    return length_bytes(kMaxHeaderBytes) + "{" + std::string(kMaxHeaderBytes - 1, ' ');
  });
  cases.add("string_100_mb", "wanted the end of a string", [] {
    return length_bytes(kMaxHeaderBytes) + "{\"" + std::string(kMaxHeaderBytes - 2, 'x');
  });
  cases.add("brackets_100_mb", "begins with '{'",
            [] { return length_bytes(kMaxHeaderBytes) + std::string(kMaxHeaderBytes, '['); });
  cases.add("rank_100_mb", "more than 64 dimensions", [] {
    std::string json = R"({"a":{"shape":[)";
    while (json.size() < kMaxHeaderBytes) json += "1,";
    json.resize(kMaxHeaderBytes);
    return length_bytes(kMaxHeaderBytes) + json;
  });
  cases.add("too_many_tensors", "more than 1000000 tensors", [] {
    std::string json = "{";
    for (std::size_t i = 0; i <= kMaxTensors; ++i) {
      json.append("\"").append(std::to_string(i));
      json += R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)";
    }
    json.back() = '}';
    return file_bytes(json, 0);
  });
  cases.add("too_many_metadata_pairs", "more than 1000000 pairs", [] {
    std::string json = R"({"__metadata__":{)";
    for (std::size_t i = 0; i <= kMaxMetadataPairs; ++i) {
      json.append("\"").append(std::to_string(i));
      json += "\":\"\",";
    }
    json.back() = '}';
    return file_bytes(json + "}", 0);
  });
}

void add_json_syntax(Cases& cases) {
  cases.json("not_json", "begins with '{'", "hello");
  cases.json("top_is_an_array", "begins with '{'", "[]");
  cases.json("top_is_null", "begins with '{'", "null");
  cases.json("top_is_a_string", "begins with '{'", "\"{}\"");
  cases.json("top_is_a_number", "begins with '{'", "42");
  cases.json("byte_order_mark", "begins with '{'", "\xef\xbb\xbf{}");
  cases.json("object_not_closed", "found the end", "{");
  cases.json("trailing_comma", "wanted a string", R"({"__metadata__":{},})");
  cases.json("missing_comma", "wanted '}'", R"({"__metadata__":{}"a":{}})");
  cases.json("missing_colon", "wanted ':'", R"({"__metadata__"{}})");
  cases.json("single_quotes", "wanted a string", "{'a':{}}");
  cases.json("comment", "found '/'", "{/* */}");
  cases.json("text_after_the_object", "wanted the end", "{}x");
  cases.json("second_object", "wanted the end", "{}{}");
  cases.json("nul_after_the_object", "wanted the end", std::string("{}\0", 3));
  cases.json("form_feed_as_blank", "wanted a string", "{\f}");
  cases.json("non_breaking_space", "wanted a string", "{\xc2\xa0}");
}

void add_strings(Cases& cases) {
  const auto name = [&cases](const std::string& title, const std::string& rule,
                             const std::string& text) {
    cases.json(title, rule, "{\"" + text + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})");
  };
  name("utf8_stray_byte", "not UTF-8", "\xff");
  name("utf8_stray_continuation", "not UTF-8", "\x80");
  name("utf8_overlong", "not UTF-8", "\xc0\x80");
  name("utf8_overlong_3", "not UTF-8", "\xe0\x9f\xbf");
  name("utf8_surrogate", "not UTF-8", "\xed\xa0\x80");
  name("utf8_above_10ffff", "not UTF-8", "\xf4\x90\x80\x80");
  name("utf8_cut_short", "not UTF-8", "\xe2\x82");
  name("lone_high_surrogate", "lone surrogate", "\\ud800");
  name("lone_low_surrogate", "lone surrogate", "\\udc00x");
  name("two_high_surrogates", "lone surrogate", "\\ud800\\ud800");
  name("unknown_escape", "an escape that JSON knows", "\\x41");
  name("short_hex_escape", "four hexadecimal digits", "\\u12");
  name("raw_line_feed", "no control character", "a\nb");
  name("raw_nul", "no control character", std::string("a\0b", 3));
  cases.json("string_not_closed", "wanted the end of a string", "{\"a");
  cases.json("escape_at_the_end", "an escape that JSON knows", "{\"a\\");
}

void add_keys(Cases& cases) {
  const std::string good = R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  const std::string empty = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  const std::string members = R"("dtype":"U8","shape":[4],"data_offsets":[0,4])";
  cases.json("duplicate_tensor", "the name occurs twice",
             R"({"a":)" + good + R"(,"a":)" + good + "}", 4);
  cases.json("duplicate_tensor_that_differs", "the name occurs twice",
             R"({"a":)" + good + R"(,"b":)" + empty + R"(,"a":)" + empty + "}", 4);
  cases.json("duplicate_tensor_by_escape", "the name occurs twice",
             R"({"a":)" + good + R"(,"\u0061":)" + empty + "}", 4);
  cases.json("duplicate_metadata", "duplicate key '__metadata__'",
             R"({"__metadata__":{},"__metadata__":{}})");
  cases.json("duplicate_metadata_key", "duplicate key 'k'",
             R"({"__metadata__":{"k":"1","k":"1"}})");
  cases.entry("duplicate_dtype", "duplicate key 'dtype'", members + R"(,"dtype":"U8")");
  cases.entry("duplicate_shape", "duplicate key 'shape'", members + R"(,"shape":[4])");
  cases.entry("duplicate_offsets", "duplicate key 'data_offsets'",
              members + R"(,"data_offsets":[0,4])");
  cases.entry("unknown_key", "unknown key 'strides'", members + R"(,"strides":[1])");
  cases.entry("missing_dtype", "dtype is missing", R"("shape":[4],"data_offsets":[0,4])");
  cases.entry("missing_shape", "shape is missing", R"("dtype":"U8","data_offsets":[0,4])");
  cases.entry("missing_offsets", "data_offsets is missing", R"("dtype":"U8","shape":[4])");
  cases.entry("entry_empty", "dtype is missing", "");
  cases.json("entry_is_an_array", "the entry must be an object", R"({"a":["U8",[4],[0,4]]})", 4);
  cases.json("entry_is_null", "the entry must be an object", R"({"a":null})");
  cases.json("entry_is_a_string", "the entry must be an object", R"({"a":"U8"})");
  cases.entry("deep_objects", "unknown key 'a'", R"("a":)" + std::string(100000, '{'));
  cases.entry("deep_shape", "JSON byte 15: found '[', wanted a whole number",
              R"("shape":)" + std::string(100000, '['));
  cases.json("metadata_is_null", "an object of strings", R"({"__metadata__":null})");
  cases.json("metadata_is_an_array", "an object of strings", R"({"__metadata__":[]})");
  cases.json("metadata_number", "the value must be a string", R"({"__metadata__":{"k":1}})");
  cases.json("metadata_nested", "the value must be a string",
             R"({"__metadata__":{"k":{"k":"v"}}})");
  cases.json("metadata_null_value", "the value must be a string", R"({"__metadata__":{"k":null}})");
}

void add_values(Cases& cases) {
  const std::string rest = R"(,"shape":[4],"data_offsets":[0,4])";
  cases.entry("dtype_unknown", "dtype 'F7' is not one of", R"("dtype":"F7")" + rest);
  cases.entry("dtype_lower_case", "dtype 'u8' is not one of", R"("dtype":"u8")" + rest);
  cases.entry("dtype_empty", "dtype '' is not one of", R"("dtype":"")" + rest);
  cases.entry("dtype_with_nul", "dtype 'U8\\x00' is not one of", R"("dtype":"U8\u0000")" + rest);
  cases.entry("dtype_number", "dtype must be a string", R"("dtype":4)" + rest);
  cases.entry("dtype_object", "dtype must be a string", R"("dtype":{"U8":null})" + rest);
  cases.shape("shape_is_a_number", "shape must be an array", "4");
  cases.shape("shape_is_a_string", "shape must be an array", "\"4\"");
  cases.shape("dimension_negative", "wanted a whole number", "[-4]");
  cases.shape("dimension_minus_zero", "wanted a whole number", "[-0]");
  cases.shape("dimension_fraction", "wanted a whole number", "[4.0]");
  cases.shape("dimension_exponent", "wanted a whole number", "[4e0]");
  cases.shape("dimension_leading_zero", "wanted ']'", "[04]");
  cases.shape("dimension_plus_sign", "wanted a whole number", "[+4]");
  cases.shape("dimension_hexadecimal", "wanted ']'", "[0x4]");
  cases.shape("dimension_string", "wanted a whole number", "[\"4\"]");
  cases.shape("dimension_null", "wanted a whole number", "[null]");
  cases.shape("dimension_nan", "wanted a whole number", "[NaN]");
  cases.shape("dimension_2_to_64", "wanted a whole number", "[18446744073709551616]");
  cases.shape("dimension_of_400_digits", "wanted a whole number",
              std::string("[").append(400, '9').append("]"));
  cases.shape("product_wraps_to_zero", "overflows", "[4294967296,4294967296]");
  // 2^62 + 1 times 4 is 4 modulo 2^64.
  cases.shape("product_wraps_to_the_size", "overflows", "[4611686018427387905,4]");
  cases.shape("bits_wrap_to_the_size", "overflows", "[2305843009213693956]");
  cases.shape("bytes_wrap_to_the_size", "overflows", "[2305843009213693953]", "F32");
  cases.json("overflow_hidden_by_zero", "overflows",
             R"({"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})");
  cases.json("bits_overflow_hidden_by_zero", "overflows",
             R"({"a":{"dtype":"U8","shape":[0,2305843009213693952],"data_offsets":[0,0]}})");
  std::string ones = "[4";
  for (int i = 0; i < 64; ++i) ones += ",1";
  cases.shape("rank_65", "more than 64 dimensions", ones + "]");
}

void add_sizes(Cases& cases) {
  cases.offsets("offsets_one", "has 1 numbers, wanted 2", "[0]");
  cases.offsets("offsets_none", "has 0 numbers, wanted 2", "[]");
  cases.offsets("offsets_three", "more than 2 numbers", "[0,4,4]");
  cases.offsets("offsets_negative", "wanted a whole number", "[-4,0]");
  cases.offsets("offsets_fraction", "wanted a whole number", "[0,4.5]");
  cases.offsets("offsets_object", "data_offsets must be an array", R"({"0":4})");
  cases.offsets("offsets_reversed", "before their begin", "[4,0]");
  cases.offsets("offsets_past_the_end", "has only 4 bytes of data", "[0,5]");
  cases.offsets("offsets_far_past_the_end", "has only 4 bytes",
                "[18446744073709551611,18446744073709551615]");
  cases.shape("shape_too_large", "shape and dtype need 5", "[5]");
  cases.shape("shape_too_small", "shape and dtype need 3", "[3]");
  cases.shape("dtype_too_wide", "shape and dtype need 16", "[4]", "F32");
  cases.shape("dtype_too_narrow", "shape and dtype need 2", "[4]", "F4");
  cases.shape("scalar_of_four_bytes", "shape and dtype need 1", "[]");
  cases.shape("empty_of_four_bytes", "shape and dtype need 0", "[0]");
  cases.shape("f4_odd", "not a whole number of bytes", "[7]", "F4");
  cases.shape("f6_not_in_fours", "not a whole number of bytes", "[5]", "F6_E2M3");
  cases.json("overlap", "overlaps with 'a'", two_tensors(0, 3), 7);
  cases.json("same_bytes_twice", "overlaps with 'a'", two_tensors(0, 0), 4);
  cases.json("hole_between", "leaves a hole, wanted 4", two_tensors(0, 5), 9);
  cases.json("hole_at_the_start", "leaves a hole, wanted 0", two_tensors(1, 5), 9);
  cases.json("empty_tensor_inside_another", "overlaps with",
             R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
             R"("b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})",
             4);
  cases.json("trailing_bytes", "the tensors end at byte 8", two_tensors(0, 4), 12);
  cases.json("truncated_data", "has only 7 bytes of data", two_tensors(0, 4), 7);
  cases.json("data_without_tensors", "the tensors end at byte 0", "{}", 4);
  cases.json("control_characters_in_a_name", R"(tensor '\x1b[31mred')",
             R"({"\u001b[31mred":{"dtype":"U8"}})");
}

}  // namespace

std::string file_bytes(const std::string& json, std::size_t data_bytes) {
  return length_bytes(json.size()) + json + std::string(data_bytes, '\0');
}

std::vector<HostileCase> hostile_headers() {
  Cases cases;
  add_lengths(cases);
  add_100_megabytes(cases);
  add_json_syntax(cases);
  add_strings(cases);
  add_keys(cases);
  add_values(cases);
  add_sizes(cases);
  return cases.take();
}

void make_case(const HostileCase& hostile, const std::filesystem::path& folder) {
  for (const HostileFile& file : hostile.make()) {
    const std::filesystem::path path = folder / file.path;
    std::filesystem::create_directories(path.parent_path());
    if (file.is_link) {
      std::filesystem::create_symlink(file.content, path);
    } else {
      std::ofstream(path, std::ios::binary) << file.content;
    }
  }
}

}  // namespace monograph::safetensors
