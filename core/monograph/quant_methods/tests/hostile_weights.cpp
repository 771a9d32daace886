// Files that are right as safetensors and wrong as weights: quant_state that lies, parts of the
// wrong size, parts that are missing.
#include "monograph/quant_methods/tests/tensor_list.h"
#include "monograph/safetensors/tests/hostile_files.h"

namespace monograph::safetensors {
namespace {

class WeightCases {
 public:
  void add(const std::string& name, const std::string& rule, const TensorList& list) {
    const auto make = [file = list.file()] {
      return std::vector<HostileFile>{{"model.safetensors", file}};
    };
    cases_.push_back({"weight_" + name, rule, "model.safetensors", make});
  }
  // The quant_state of a nested weight is this text.
  void state(const std::string& name, const std::string& rule, const std::string& text) {
    add("state_" + name, rule, nested_weight(text));
  }
  // `from` in the good quant_state is replaced by `to`.
  void lie(const std::string& name, const std::string& rule, const std::string& from,
           const std::string& to) {
    std::string text = kNestedState;
    text.replace(text.find(from), from.size(), to);
    state(name, rule, text);
  }
  // One part of the nested weight gets another type and shape.
  void part(const std::string& name, const std::string& rule, const std::string& suffix,
            StoredDType dtype, std::vector<std::uint64_t> shape) {
    TensorList list = nested_weight();
    TestTensor& tensor = list.at("w.weight" + suffix);
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.bytes.clear();
    add(name, rule, list);
  }
  void without(const std::string& name, const std::string& rule, const std::string& suffix) {
    TensorList list = nested_weight();
    list.remove("w.weight" + suffix);
    add(name, rule, list);
  }
  std::vector<HostileCase> take() { return std::move(cases_); }

 private:
  std::vector<HostileCase> cases_;
};

void add_state_text(WeightCases& cases) {
  cases.state("empty", "quant_state: JSON byte 0", "");
  cases.state("is_a_list", "must be an object", "[]");
  cases.state("cut_off", "found the end", R"({"quant_type": "nf4", "blocksize": 6)");
  cases.state("trailing_text", "wanted the end", std::string(kNestedState) + "x");
  cases.state("not_utf8", "not UTF-8", "{\"\xff\": 1}");
  cases.state("too_long", "at most 4096 are allowed", std::string(5000, ' ') + kNestedState);
  cases.state("deep", "nested too deeply", "{\"shape\": " + std::string(4000, '['));
  cases.lie("unknown_key", "unknown key 'code'", "\"dtype\"", "\"code\": 1, \"dtype\"");
  cases.lie("duplicate_key", "duplicate key 'shape'", "\"dtype\"", "\"shape\": [1], \"dtype\"");
}

void add_state_lies(WeightCases& cases) {
  cases.lie("no_type", "quant_type is missing", R"("quant_type": "nf4", )", "");
  cases.lie("other_type", "quant_type is 'fp4'", "nf4", "fp4");
  cases.lie("type_is_a_number", "quant_type must be a string", R"("nf4")", "4");
  cases.lie("no_blocksize", "blocksize is missing", R"("blocksize": 64, )", "");
  cases.lie("blocksize_zero", "blocksize is 0", "64", "0");
  cases.lie("blocksize_65", "blocksize is 65", "64", "65");
  cases.lie("blocksize_huge", "blocksize is 9223372036854775808", "64", "9223372036854775808");
  cases.lie("blocksize_negative", "blocksize must be a whole number", "64", "-64");
  cases.lie("blocksize_float", "blocksize must be a whole number", "64", "64.0");
  cases.lie("blocksize_other", "absmax has the shape [6], wanted [3]", "64", "128");
  cases.lie("dtype_unknown", "dtype is 'int8'", "bfloat16", "int8");
  cases.lie("shape_larger", "values has 192 bytes, wanted 384", "[4, 96]", "[8, 96]");
  cases.lie("shape_smaller", "values has 192 bytes, wanted 1", "[4, 96]", "[2]");
  cases.lie("shape_zero", "values has 192 bytes, wanted 0", "[4, 96]", "[0, 96]");
  cases.lie("shape_empty", "shape has 0 dimensions", "[4, 96]", "[]");
  cases.lie("shape_wraps_to_384", "the product of shape overflows", "[4, 96]",
            "[4294967296, 4294967296, 384]");
  cases.lie("shape_wraps_behind_zero", "the product of shape overflows", "[4, 96]",
            "[0, 9223372036854775808, 2]");
  cases.lie("shape_times_four_wraps", "the product of shape overflows", "[4, 96]",
            "[4611686018427387904]");
  cases.lie("shape_negative", "shape must be a whole number", "[4, 96]", "[-4, -96]");
  cases.lie("shape_is_a_number", "shape must be an array", "[4, 96]", "384");
  cases.lie("shape_of_65", "shape has 65 dimensions", "[4, 96]", [] {
    std::string shape = "[384";
    for (int i = 0; i < 64; ++i) shape += ",1";
    return shape + "]";
  }());
  cases.lie("nested_blocksize", "nested_blocksize is 1, wanted 256", "256", "1");
  cases.lie("nested_dtype", "nested_dtype is 'float64'", "float32", "float64");
  cases.lie("nested_offset_text", "nested_offset must be a finite", "0.5", R"("0.5")");
  cases.lie("nested_offset_nan", "nested_offset must be a finite", "0.5", "NaN");
  cases.lie("nested_offset_huge", "nested_offset must be a finite", "0.5", "1e39");
  cases.lie("nested_half", "wanted all or none", R"(, "nested_offset": 0.5)", "");
}

void add_parts(WeightCases& cases) {
  using T = StoredDType;
  cases.part("values_short", "values has 191 bytes", "", T::kU8, {191, 1});
  cases.part("values_long", "values has 193 bytes", "", T::kU8, {193, 1});
  cases.part("absmax_short", "absmax has the shape [5], wanted [6]", ".absmax", T::kU8, {5});
  cases.part("absmax_empty", "absmax has the shape [0], wanted [6]", ".absmax", T::kU8, {0});
  cases.part("absmax_two_dimensions", "absmax has the shape [6, 1]", ".absmax", T::kU8, {6, 1});
  cases.part("absmax_not_nested", "absmax is F32, wanted U8", ".absmax", T::kF32, {6});
  cases.part("absmax_signed", "absmax is I8, wanted U8", ".absmax", T::kI8, {6});
  cases.part("groups_missing_one", "nested_absmax has the shape [0], wanted [1]", ".nested_absmax",
             T::kF32, {0});
  cases.part("groups_half", "nested_absmax is F16, wanted F32", ".nested_absmax", T::kF16, {1});
  cases.part("nested_map_short", "nested_quant_map has the shape [255]", ".nested_quant_map",
             T::kF32, {255});
  cases.part("nested_map_bf16", "nested_quant_map is BF16", ".nested_quant_map", T::kBF16, {256});
  cases.part("map_short", "quant_map has the shape [15]", ".quant_map", T::kF32, {15});
  cases.part("map_zeros", "quant_map is not the table of nf4", ".quant_map", T::kF32, {16});
  cases.part("state_is_float", "quant_state is F32, wanted U8", ".quant_state.bitsandbytes__nf4",
             T::kF32, {40});
  cases.without("without_values", "lacks values, absmax or quant_state", "");
  cases.without("without_absmax", "lacks values, absmax or quant_state", ".absmax");
  cases.without("without_state", "lacks values, absmax or quant_state",
                ".quant_state.bitsandbytes__nf4");
  cases.without("without_groups", "nested_absmax is missing", ".nested_absmax");
  cases.without("without_nested_map", "nested_quant_map is missing", ".nested_quant_map");
  TensorList list = nested_weight(kPlainState);
  list.at("w.weight.absmax").dtype = T::kF32;
  cases.add("nested_parts_without_state", "nested_absmax is there", list);
}

void add_other_formats(WeightCases& cases) {
  using T = StoredDType;
  const auto two = [&](const std::string& name, const std::string& rule, const std::string& values,
                       T dtype, std::vector<std::uint64_t> shape, const std::string& scale,
                       T scale_dtype, std::vector<std::uint64_t> scale_shape) {
    TensorList list;
    list.add(values, dtype, std::move(shape));
    list.add(scale, scale_dtype, std::move(scale_shape));
    cases.add(name, rule, list);
  };
  two("fp8_block_of_96", "scale fits neither", "w.weight", T::kF8E4M3, {192, 256},
      "w.weight_scale_inv", T::kF32, {3, 2});
  two("fp8_without_rows", "values have no rows", "w.weight", T::kF8E4M3, {256},
      "w.weight_scale_inv", T::kF32, {2});
  two("mxfp4_scale_short", "scale has the shape [4, 1], wanted [4, 2]", "w.weight_packed", T::kU8,
      {4, 32}, "w.weight_scale", T::kU8, {4, 1});
  two("mxfp4_half_a_block", "are not whole blocks of 32", "w.weight_packed", T::kU8, {4, 24},
      "w.weight_scale", T::kU8, {4, 1});
  two("gpt_oss_blocks_of_15", "must have the shape", "w_blocks", T::kU8, {2, 4, 3, 15}, "w_scales",
      T::kU8, {2, 4, 3});
  two("gpt_oss_scales_short", "scale has the shape [2, 4, 2]", "w_blocks", T::kU8, {2, 4, 3, 16},
      "w_scales", T::kU8, {2, 4, 2});
  two("stack_scale_short", "scale has the shape [2, 4, 1], wanted [2, 4, 2]", "w_packed", T::kU8,
      {2, 4, 32}, "w_scale", T::kU8, {2, 4, 1});
  two("stack_scale_of_fewer", "scale has the shape [1, 4, 2], wanted [2, 4, 2]", "w_packed", T::kU8,
      {2, 4, 32}, "w_scale", T::kU8, {1, 4, 2});
  two("stack_fp8_scale_short", "scale fits neither", "w", T::kF8E4M3, {2, 192, 256}, "w_scale_inv",
      T::kF32, {2, 1, 2});
  two("stack_mxfp8_scale_short", "scale fits neither", "w", T::kF8E4M3, {2, 8, 64}, "w_scale",
      T::kU8, {2, 8, 3});
  two("int8_scale_short", "scale has the shape [3], wanted [4]", "w.weight", T::kI8, {4, 8},
      "w.SCB", T::kF32, {3});
  two("int8_row_scale_short", "scale has the shape [3, 1], wanted [4, groups]", "w.weight", T::kI8,
      {4, 8}, "w.weight_scale", T::kF32, {3, 1});
  two("int8_uneven_groups", "scale has the shape [4, 3], wanted [4, groups]", "w.weight", T::kI8,
      {4, 8}, "w.weight_scale", T::kF32, {4, 3});
  two("int8_scale_of_integers", "scale is I32, wanted BF16, F16 or F32", "w.weight", T::kI8, {4, 8},
      "w.weight_scale", T::kI32, {4, 1});
  two("int8_without_columns", "values have no rows and columns", "w.weight", T::kI8, {4},
      "w.weight_scale", T::kF32, {4, 1});
  const auto packed = [&](const std::string& name, const std::string& rule, std::int64_t rows,
                          std::int64_t cols, const auto& change) {
    TensorList four;
    const std::int64_t numbers[] = {rows, cols};
    four.add("w.weight_packed", T::kI32, {9, 8});
    four.add("w.weight_scale", T::kF16, {9, 2});
    four.add("w.weight_shape", T::kI64, {2}, bytes_of(numbers, 2));
    four.add("w.weight_zero_point", T::kI32, {2, 2});
    change(four);
    cases.add(name, rule, four);
  };
  const auto nothing = [](TensorList&) {};
  packed("int4_negative_shape", "wanted no negative number", 9, -64, nothing);
  packed("int4_other_rows", "values do not have the 8 rows", 8, 64, nothing);
  packed("int4_huge_rows", "values do not have the 9 rows", 9, std::int64_t{1} << 62, nothing);
  packed("int4_zero_points_short", "zero_point has the shape [1, 2], wanted [2, 2]", 9, 64,
         [](TensorList& four) {
           four.at("w.weight_zero_point").shape = {1, 2};
         });
  packed("int4_zero_points_of_bytes", "zero_point is I8, wanted I32", 9, 64,
         [](TensorList& four) { four.at("w.weight_zero_point").dtype = T::kI8; });
  packed("int4_one_scale_and_zero_points", "zero_point has the shape [2, 2], wanted [2, 1]", 9, 64,
         [](TensorList& four) { four.at("w.weight_scale").shape = {1}; });
  packed("int4_shape_of_three", "shape has the shape [3], wanted [2]", 9, 64, [](TensorList& four) {
    four.at("w.weight_shape").shape = {3};
    four.at("w.weight_shape").bytes.clear();
  });
  const auto columns = [&](const std::string& name, const std::string& rule, std::size_t count,
                           std::int32_t last) {
    packed("int4_columns_" + name, rule, 9, 64, [&](TensorList& four) {
      std::vector<std::int32_t> order(count);
      for (std::size_t i = 0; i < count; ++i) order[i] = static_cast<std::int32_t>(i);
      order.back() = last;
      four.add("w.weight_columns", T::kI32, {count}, bytes_of(order.data(), count));
    });
  };
  columns("short", "columns has the shape [63], wanted [64]", 63, 62);
  columns("negative", "columns has -1 at 63, wanted each of 0 to 63 once", 64, -1);
  columns("beyond", "columns has 64 at 63, wanted each of 0 to 63 once", 64, 64);
  columns("twice", "columns has 0 at 63, wanted each of 0 to 63 once", 64, 0);
  packed("int4_columns_of_long", "columns is I64, wanted I32", 9, 64,
         [](TensorList& four) { four.add("w.weight_columns", T::kI64, {64}); });
  TensorList list;
  list.add("w.weight", T::kU8, {4, 32});
  list.add("w.weight_scale", T::kF8E4M3, {4, 4});
  list.add("w.weight_scale_2", T::kF32, {2});
  cases.add("nvfp4_two_global_scales", "global scale has 2 elements", list);
  list = TensorList();
  list.add("w_packed", T::kU8, {3, 4, 32});
  list.add("w_scale", T::kF8E4M3, {3, 4, 4});
  list.add("w_global_scale", T::kF32, {2});
  cases.add("stack_two_global_scales", "global scale has 2 elements, wanted 1 or 3", list);
  list = TensorList();
  list.add("w.weight", T::kBF16, {4, 64});
  list.add("w.weight_packed", T::kU8, {4, 32});
  list.add("w.weight_scale", T::kU8, {4, 2});
  cases.add("stored_twice", "is stored twice, as", list);
}

}  // namespace

std::vector<HostileCase> hostile_weights() {
  WeightCases cases;
  add_state_text(cases);
  add_state_lies(cases);
  add_parts(cases);
  add_other_formats(cases);
  return cases.take();
}

}  // namespace monograph::safetensors
