#include "monograph/convert/turn_words.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "monograph/base/error.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/quant_methods/skip_reason.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using safetensors::StoredDType;
using safetensors::TensorSpec;

const safetensors::LocatedTensor& part_of(const Weight& weight, std::string_view role) {
  return std::find_if(weight.parts.begin(), weight.parts.end(),
                      [&](const Part& part) { return part.role == role; })
      ->tensor;
}

std::uint32_t word_at(const std::uint8_t* words, std::uint64_t index) {
  std::uint32_t word;
  std::memcpy(&word, words + 4 * index, sizeof word);
  return word;
}

// AWQ's word with its nibbles in order.
std::uint32_t in_order(std::uint32_t word) {
  std::uint32_t out = 0;
  for (std::size_t i = 0; i < kAwqOrder.size(); ++i) {
    out |= (word >> (4 * i) & 15u) << (4 * kAwqOrder[i]);
  }
  return out;
}

bool has_full_field(std::uint32_t word, unsigned bits) {
  const std::uint32_t full = (1u << bits) - 1;
  for (unsigned at = 0; at < 32; at += bits) {
    if ((word >> at & full) == full) return true;
  }
  return false;
}

// The zero points of a word, in the order of outputs.
std::uint32_t zeros_of(std::uint32_t word, const Weight& weight, const WordLayout& layout) {
  if (layout.along_outputs) return in_order(word);
  if (layout.zeros == ZeroFields::kAsTheyAre) return word;
  if (layout.zeros == ZeroFields::kLessOne && has_full_field(word, layout.bits)) {
    const auto& part = part_of(weight, "zero_point");
    throw Error(part.file->path().string() + ": tensor " + text::in_quotes(part.entry->name) +
                ": a zero point is stored as " + std::to_string((1u << layout.bits) - 1) +
                ", which is 0 or " + std::to_string(1u << layout.bits) +
                " by who wrote it; wanted meta.quantizer gptqmodel in quantization_config, or "
                "checkpoint_format gptq_v2");
  }
  return word + (layout.bits == 4 ? 0x11111111u : 0x01010101u);
}

// [words of outputs][groups], from [groups][words of outputs].
std::vector<std::uint32_t> turned_zeros(const Weight& weight, const WordLayout& layout) {
  const std::uint64_t words = layout.outputs / layout.per_word(), groups = layout.groups();
  const std::uint8_t* from = part_of(weight, "zero_point").bytes().data();
  std::vector<std::uint32_t> out(words * groups);
  for (std::uint64_t g = 0; g < groups; ++g) {
    for (std::uint64_t i = 0; i < words; ++i) {
      out[i * groups + g] = zeros_of(word_at(from, g * words + i), weight, layout);
    }
  }
  return out;
}

std::vector<std::uint8_t> turned_scales(const Weight& weight, const WordLayout& layout) {
  const auto& part = part_of(weight, "scale");
  const std::uint64_t groups = layout.groups();
  const std::size_t size = part.entry->dtype == StoredDType::kF32 ? 4 : 2;
  const std::uint8_t* from = part.bytes().data();
  std::vector<std::uint8_t> out(layout.outputs * groups * size);
  for (std::uint64_t g = 0; g < groups; ++g) {
    for (std::uint64_t n = 0; n < layout.outputs; ++n) {
      std::memcpy(out.data() + (n * groups + g) * size, from + (g * layout.outputs + n) * size,
                  size);
    }
  }
  return out;
}

// Rows whose inputs are taken in the order of `layout.columns`.
void turn_sorted(const std::uint8_t* from, const WordLayout& layout, std::uint64_t first,
                 std::uint64_t rows, std::uint8_t* out) {
  const std::uint64_t per_word = layout.per_word(), row_words = layout.inputs / per_word;
  const std::uint32_t full = layout.bits == 4 ? 15u : 255u;
  std::vector<std::uint32_t> words(rows);
  for (std::uint64_t k = 0; k < row_words; ++k) {
    std::fill(words.begin(), words.end(), 0u);
    for (std::uint64_t i = 0; i < per_word; ++i) {
      const std::uint64_t input = layout.columns[k * per_word + i];
      const std::uint64_t begin = input / per_word * layout.outputs + first;
      const auto shift = static_cast<unsigned>(input % per_word) * layout.bits;
      const auto place = static_cast<unsigned>(i) * layout.bits;
      for (std::uint64_t n = 0; n < rows; ++n) {
        words[n] |= (word_at(from, begin + n) >> shift & full) << place;
      }
    }
    for (std::uint64_t n = 0; n < rows; ++n) {
      std::memcpy(out + 4 * (n * row_words + k), &words[n], 4);
    }
  }
}

std::string stem_of(const Weight& weight) { return std::string(module_of(weight.name)); }

}  // namespace

std::vector<TensorSpec> turned_specs(const Conversion& conversion) {
  const WordLayout& layout = *conversion.words;
  const std::string stem = stem_of(*conversion.weight);
  const char* values = conversion.writes_columns ? ".weight" : ".weight_packed";
  std::vector<TensorSpec> specs = {
      {stem + values, StoredDType::kI32, {layout.outputs, layout.inputs / layout.per_word()}},
      {stem + ".weight_scale",
       part_of(*conversion.weight, "scale").entry->dtype,
       {layout.outputs, layout.groups()}},
      {stem + ".weight_shape", StoredDType::kI64, {2}}};
  if (!conversion.symmetric) {
    specs.push_back({stem + ".weight_zero_point",
                     StoredDType::kI32,
                     {layout.outputs / layout.per_word(), layout.groups()}});
  }
  if (conversion.writes_columns) {
    specs.push_back({stem + ".weight_columns", StoredDType::kI32, {layout.inputs}});
  }
  return specs;
}

bool zeros_are_middle(const Weight& weight, const WordLayout& layout) {
  const std::vector<std::uint32_t> zeros = turned_zeros(weight, layout);
  const std::uint32_t middle = layout.bits == 4 ? 0x88888888u : 0x80808080u;
  return std::all_of(zeros.begin(), zeros.end(),
                     [&](std::uint32_t word) { return word == middle; });
}

void turn_rows(const Weight& weight, const WordLayout& layout, std::uint64_t first,
               std::uint64_t rows, std::uint8_t* out) {
  const std::uint8_t* from = part_of(weight, "values").bytes().data();
  const std::uint64_t row_words = layout.inputs / layout.per_word();
  if (!layout.columns.empty()) return turn_sorted(from, layout, first, rows, out);
  if (!layout.along_outputs) {
    for (std::uint64_t k = 0; k < row_words; ++k) {
      for (std::uint64_t n = 0; n < rows; ++n) {
        std::memcpy(out + 4 * (n * row_words + k), from + 4 * (k * layout.outputs + first + n), 4);
      }
    }
    return;
  }
  // Eight words of eight outputs become eight words of eight inputs.
  const std::uint64_t out_words = layout.outputs / 8;
  for (std::uint64_t k = 0; k < row_words; ++k) {
    for (std::uint64_t n = 0; n < rows; n += 8) {
      std::uint32_t turned[8] = {};
      for (std::uint64_t i = 0; i < 8; ++i) {
        const std::uint32_t word = word_at(from, (8 * k + i) * out_words + (first + n) / 8);
        for (std::size_t j = 0; j < 8; ++j) {
          turned[kAwqOrder[j]] |= (word >> (4 * j) & 15u) << (4 * i);
        }
      }
      for (std::uint64_t j = 0; j < 8; ++j) {
        std::memcpy(out + 4 * ((n + j) * row_words + k), &turned[j], 4);
      }
    }
  }
}

void write_turned_parts(const Conversion& conversion, safetensors::ShardedWriter& writer) {
  const Weight& weight = *conversion.weight;
  const WordLayout& layout = *conversion.words;
  const std::string stem = stem_of(weight);
  const std::vector<std::uint8_t> scales = turned_scales(weight, layout);
  write_array(writer, stem + ".weight_scale", scales.data(), scales.size());
  const std::int64_t shape[2] = {static_cast<std::int64_t>(layout.outputs),
                                 static_cast<std::int64_t>(layout.inputs)};
  write_array(writer, stem + ".weight_shape", shape, 2);
  if (conversion.writes_columns) {
    std::vector<std::uint32_t> columns = layout.columns;
    if (columns.empty()) {
      columns.resize(layout.inputs);
      std::iota(columns.begin(), columns.end(), 0u);
    }
    write_array(writer, stem + ".weight_columns", columns.data(), columns.size());
  }
  if (conversion.symmetric) return;
  const std::vector<std::uint32_t> zeros = turned_zeros(weight, layout);
  write_array(writer, stem + ".weight_zero_point", zeros.data(), zeros.size());
}

}  // namespace monograph
