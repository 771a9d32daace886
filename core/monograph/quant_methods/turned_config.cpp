#include "monograph/quant_methods/turned_config.h"

#include <string>

#include "monograph/base/error.h"
#include "monograph/quant_methods/group_parts.h"
#include "monograph/quant_methods/quantization_config.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

using json::Value;

bool by_row(const WordLayout& layout) { return layout.groups() == 1; }

std::string scheme_text(const WordLayout& layout) {
  return std::to_string(layout.bits) + " bits " +
         (by_row(layout) ? "by row" : "in groups of " + std::to_string(layout.group));
}

// The weight whose scheme counts: a row that is one group says nothing of the groups of others.
const Conversion& first_turned(std::span<const Conversion> conversions) {
  const Conversion* first = nullptr;
  for (const Conversion& one : conversions) {
    if (one.action != Action::kTurn) continue;
    if (first == nullptr || (by_row(*first->words) && !by_row(*one.words))) first = &one;
  }
  if (first == nullptr) throw Error("no weight is in the words of GPTQ or AWQ");
  return *first;
}

void check_same(const Conversion& first, const Conversion& other) {
  const WordLayout &a = *first.words, &b = *other.words;
  const bool same_groups = by_row(a) ? by_row(b) : a.group == b.group;
  if (a.bits == b.bits && same_groups) return;
  throw Error("weight " + text::in_quotes(other.weight->name) + " has " + scheme_text(b) + ", " +
              text::in_quotes(first.weight->name) + " has " + scheme_text(a) +
              "; wanted one scheme for all");
}

Value scheme_of(const Conversion& first) {
  const WordLayout& layout = *first.words;
  return integer_scheme(layout.bits, by_row(layout) ? 0 : layout.group, first.symmetric);
}

// As for quantised weights, but that a head may be turned.
Value left_alone(std::span<const Conversion> conversions) {
  Value list = Value::array();
  const Value skipped = skipped_modules(conversions);
  for (const Value& name : skipped.items()) {
    const std::string weight = std::string(name.as_string().value_or("")) + ".weight";
    bool turned = false;
    for (const Conversion& one : conversions) {
      turned |= one.action == Action::kTurn && one.weight->name == weight;
    }
    if (!turned) list.append(name);
  }
  return list;
}

}  // namespace

Value turned_config(std::span<const Conversion> conversions) {
  const Conversion& first = first_turned(conversions);
  for (const Conversion& one : conversions) {
    if (one.action == Action::kTurn) check_same(first, one);
  }
  Value value = compressed_config("pack-quantized", scheme_of(first), left_alone(conversions));
  if (first.writes_columns) value.set("quant_method", Value::string("monograph"));
  return value;
}

}  // namespace monograph
