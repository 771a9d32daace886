#include "monograph/quant_methods/word_layouts.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace monograph {
namespace {

using safetensors::LocatedTensor;
using safetensors::StoredDType;
using Shape = std::vector<std::uint64_t>;

const json::Value* settings_of(const json::Value* config) {
  const json::Value* found = config ? config->find("quantization_config") : nullptr;
  return found != nullptr && found->is(json::Kind::kObject) ? found : nullptr;
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](char c) {
    return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  });
  return out;
}

// The text at a key, in lower case; empty if there is none.
std::string text_at(const json::Value& settings, std::string_view key) {
  const json::Value* found = settings.find(key);
  return lower(found ? found->as_string().value_or("") : "");
}

bool is_true(const json::Value& settings, std::string_view key) {
  const json::Value* found = settings.find(key);
  return found != nullptr && found->as_bool() == true;
}

bool is_auto_round(const std::string& method) {
  return method == "auto-round" || method == "intel/auto-round";
}

// Whether meta.quantizer, a text or a list of them, names GPTQModel.
bool written_by_gptqmodel(const json::Value& settings) {
  const json::Value* meta = settings.find("meta");
  const json::Value* quantizer =
      meta != nullptr && meta->is(json::Kind::kObject) ? meta->find("quantizer") : nullptr;
  if (quantizer == nullptr) return false;
  const auto names_it = [](const json::Value& value) {
    return lower(value.as_string().value_or("")).starts_with("gptqmodel");
  };
  if (!quantizer->is(json::Kind::kArray)) return names_it(*quantizer);
  return std::any_of(quantizer->items().begin(), quantizer->items().end(), names_it);
}

std::optional<ZeroFields> zero_fields(const json::Value& settings, const std::string& method,
                                      std::string& why) {
  if (is_auto_round(method)) {
    const std::string packing = text_at(settings, "packing_format");
    if (packing == "auto_round:auto_gptq") return ZeroFields::kLessOne;
    if (packing == "auto_round") return ZeroFields::kAsTheyAre;
    why = "packing_format is '" + packing + "', wanted auto_round, auto_round:auto_gptq or *awq*";
    return std::nullopt;
  }
  // GPTQModel reads both names.
  const std::string old_name = text_at(settings, "checkpoint_format");
  const std::string new_name = text_at(settings, "format");
  if (!old_name.empty() && !new_name.empty() && old_name != new_name) {
    why = "checkpoint_format is '" + old_name + "' and format is '" + new_name + "', wanted one";
    return std::nullopt;
  }
  const std::string format = old_name.empty() ? new_name : old_name;
  if (format == "gptq_v2") return ZeroFields::kAsTheyAre;
  if (format.empty() || format == "gptq") {
    return written_by_gptqmodel(settings) ? ZeroFields::kLessOneByWords : ZeroFields::kLessOne;
  }
  why = std::string(old_name.empty() ? "format" : "checkpoint_format") + " is '" + format +
        "', wanted gptq or gptq_v2";
  return std::nullopt;
}

// A setting as a message shows it.
std::string shown(const json::Value* value) {
  if (value == nullptr) return "missing";
  if (value->is(json::Kind::kNull)) return "null";
  if (const auto text = value->as_string()) return "'" + std::string(*text) + "'";
  return value->text();
}

// The group of each input. Throws Error if one is not among the scales.
std::vector<std::uint32_t> groups_of(const Candidate& found, std::uint64_t groups) {
  const auto bytes = found.part("g_idx")->bytes();
  std::vector<std::uint32_t> out(bytes.size() / 4);
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::int32_t at;
    std::memcpy(&at, bytes.data() + 4 * i, 4);
    if (at < 0 || static_cast<std::uint64_t>(at) >= groups) {
      found.fail("g_idx puts input " + std::to_string(i) + " into group " + std::to_string(at) +
                 ", wanted 0 to " + std::to_string(groups - 1));
    }
    out[i] = static_cast<std::uint32_t>(at);
  }
  return out;
}

// Whether input i is of group i / group, for all.
bool in_order(const std::vector<std::uint32_t>& groups, std::uint64_t group) {
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (groups[i] != i / group) return false;
  }
  return true;
}

// Inputs by group, those of one group in their order; false, with the reason in `why`, if it cannot
// be done.
bool sort_columns(const Candidate& found, const json::Value& settings, WordLayout& layout,
                  std::string& why) {
  const std::vector<std::uint32_t> groups = groups_of(found, layout.groups());
  if (in_order(groups, layout.group)) return true;
  const json::Value* stated = settings.find("desc_act");
  if (stated != nullptr && stated->as_bool() == false) {
    // Some programs then ignore g_idx.
    why = "g_idx takes inputs out of order, and desc_act is false; wanted true";
    return false;
  }
  std::vector<std::uint64_t> sizes(layout.groups());
  for (const std::uint32_t at : groups) ++sizes[at];
  const auto other = std::find_if(sizes.begin(), sizes.end(),
                                  [&](std::uint64_t size) { return size != layout.group; });
  if (other != sizes.end()) {
    why = "g_idx puts " + std::to_string(*other) + " inputs into group " +
          std::to_string(other - sizes.begin()) + ", wanted " + std::to_string(layout.group) +
          " in each";
    return false;
  }
  layout.columns.resize(groups.size());
  std::iota(layout.columns.begin(), layout.columns.end(), 0u);
  std::stable_sort(layout.columns.begin(), layout.columns.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return groups[a] < groups[b]; });
  return true;
}

// Every shape follows from outputs, inputs and bits.
void check_shapes(const Candidate& found, const WordLayout& layout) {
  const std::uint64_t per_word = layout.per_word(), out_words = layout.outputs / per_word;
  const std::uint64_t groups = layout.groups();
  const Shape values = layout.along_outputs ? Shape{layout.inputs, out_words}
                                            : Shape{layout.inputs / per_word, layout.outputs};
  found.want_shape("values", values);
  const Shape zeros = {groups, out_words}, scales = {groups, layout.outputs};
  found.want_dtype("zero_point", StoredDType::kI32);
  found.want_shape("zero_point", zeros);
  found.want_shape("scale", scales);
  if (found.part("g_idx") != nullptr) {
    const Shape columns = {layout.inputs};
    found.want_dtype("g_idx", StoredDType::kI32);
    found.want_shape("g_idx", columns);
  }
}

}  // namespace

bool says_symmetric(const json::Value* config) {
  const json::Value* settings = settings_of(config);
  if (settings == nullptr) return false;
  const json::Value* zero_point = settings->find("zero_point");
  return is_true(*settings, "sym") || (zero_point != nullptr && zero_point->as_bool() == false);
}

bool says_awq(const json::Value* config) {
  const json::Value* settings = settings_of(config);
  if (settings == nullptr) return false;
  const std::string method = text_at(*settings, "quant_method");
  return method == "awq" || (is_auto_round(method) &&
                             text_at(*settings, "packing_format").find("awq") != std::string::npos);
}

std::optional<WordLayout> word_layout(const Candidate& found, std::string& why) {
  const json::Value* settings = settings_of(found.config());
  if (settings == nullptr) {
    why = "config.json has no quantization_config that says how the words are packed";
    return std::nullopt;
  }
  const std::string method = text_at(*settings, "quant_method");
  if (method != "gptq" && method != "awq" && !is_auto_round(method)) {
    why = "quant_method is '" + method + "', wanted gptq, awq or auto-round";
    return std::nullopt;
  }
  WordLayout layout;
  layout.along_outputs = says_awq(found.config());
  const json::Value* bits = settings->find("bits");
  const std::uint64_t stated = bits ? bits->as_unsigned().value_or(0) : 0;
  if (stated != 4 && (stated != 8 || layout.along_outputs)) {
    why = "bits is " + shown(bits) + ", wanted 4" + (layout.along_outputs ? "" : " or 8");
    return std::nullopt;
  }
  layout.bits = static_cast<unsigned>(stated);
  if (layout.along_outputs && method == "awq") {
    for (const char* key : {"version", "format", "checkpoint_format"}) {
      const std::string version = text_at(*settings, key);
      if (version.empty() || version == "gemm") continue;
      why = std::string(key) + " is '" + version + "', wanted gemm";
      return std::nullopt;
    }
  }
  if (!layout.along_outputs) {
    const auto zeros = zero_fields(*settings, method, why);
    if (!zeros) return std::nullopt;
    layout.zeros = *zeros;
  }

  const Shape& values = found.shape_of("values");
  const Shape& scales = found.shape_of("scale");
  if (values.size() != 2 || scales.size() != 2)
    found.fail("values or scales have no two dimensions");
  layout.outputs = scales[1];
  layout.inputs = layout.along_outputs ? values[0] : values[0] * layout.per_word();
  const std::uint64_t groups = scales[0];
  if (groups == 0 || layout.inputs == 0 || layout.outputs == 0 ||
      layout.outputs % layout.per_word() != 0 || layout.inputs % groups != 0 ||
      layout.inputs % layout.per_word() != 0) {
    found.fail("scales of [" + std::to_string(groups) + ", " + std::to_string(layout.outputs) +
               "] do not divide " + std::to_string(layout.inputs) + " inputs into groups of words");
  }
  layout.group = layout.inputs / groups;
  check_shapes(found, layout);
  const json::Value* group = settings->find("group_size");
  const bool by_row = groups == 1 && (group == nullptr || group->as_double() == -1);
  if (!by_row && (group == nullptr || group->as_unsigned() != layout.group)) {
    found.fail("group_size is " + shown(group) + ", and scales reach over " +
               std::to_string(layout.group) + " inputs");
  }
  if (found.part("g_idx") != nullptr && !sort_columns(found, *settings, layout, why)) {
    return std::nullopt;
  }
  const bool sorted = is_true(*settings, "desc_act") && !is_true(*settings, "static_groups");
  if (sorted && found.part("g_idx") == nullptr) {
    why = "desc_act is true and there is no g_idx";
    return std::nullopt;
  }
  const StoredDType scale = found.dtype_of("scale");
  if (scale != StoredDType::kF16 && scale != StoredDType::kBF16 && scale != StoredDType::kF32) {
    why = "scales are " + std::string(name_of(scale)) + ", wanted F16, BF16 or F32";
    return std::nullopt;
  }
  return layout;
}

WordLayout words_of(const Weight& weight, const json::Value& config) {
  Weight copy = weight;  // a candidate may be described
  const Candidate found(&config, copy);
  std::string why;
  const auto layout = word_layout(found, why);
  if (!layout) found.fail(why);
  return *layout;
}

void describe_words(const Candidate& found) {
  Weight& weight = found.weight();
  std::string why;
  const auto layout = word_layout(found, why);
  weight.dtype = found.dtype_of("scale");
  if (!layout) {
    weight.format = "words";
    return found.set_shape(found.shape_of("values"), {});
  }
  weight.format = layout->along_outputs ? "awq" : "gptq";
  found.set_shape({layout->outputs, layout->inputs}, {1, layout->group});
}

}  // namespace monograph
