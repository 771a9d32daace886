#include "monograph/merge/model_card.h"

#include <array>
#include <cstdio>

#include "monograph/text/json_document.h"

namespace monograph {
namespace {

// A name inside Markdown: nothing in it may begin a link, a tag or a new line.
std::string code(const std::string& name) {
  std::string text = "`";
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    text += byte == '`' || byte < 0x20 || byte == 0x7f ? '_' : c;
  }
  return text + "`";
}

std::string number(double value, const char* format) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

}  // namespace

std::string model_card(const Card& card, std::span<const MergeRow> rows) {
  std::string text = "---\nbase_model: " + json::quote(card.base_model) +
                     "\nbase_model_relation: finetune\nlibrary_name: transformers\ntags:\n"
                     "- monograph\n- merged\n---\n\n# " +
                     code(card.title) +
                     "\n\nAn adapter merged into its base by `monograph merge`.\n\n";
  text += "| | |\n|---|---|\n";
  text += "| base | " + code(card.base_model) + ", " + card.base_weights + " weights |\n";
  text += "| its hash | `" + card.base_sha256 + "` |\n";
  for (const CardAdapter& adapter : card.adapters) {
    text += "| adapter | " + code(adapter.name) + ", weight " + number(adapter.weight, "%g") +
            ", `" + adapter.sha256 + "` |\n";
  }
  text += "| stored as | " + card.format + " |\n";
  Survival whole;
  const MergeRow* worst = nullptr;
  for (const MergeRow& row : rows) {
    whole += row.survival;
    if (worst == nullptr || row.survival.errs_more_than(worst->survival.error_along_adapter())) {
      worst = &row;
    }
  }
  text += "\nHashes are those of `monograph inspect --hash`. ";
  if (worst != nullptr) {
    text += std::to_string(rows.size()) + " weights changed. Of the adapter's change " +
            number(100 * whole.kept(), "%.1f") + " % is kept, with an error along it of " +
            number(whole.error_along_adapter(), "%.4f") + " of its length; the largest in " +
            code(worst->name) + " (" + number(worst->survival.error_along_adapter(), "%.4f") +
            ").\n";
  } else {
    text += "No weight changed.\n";
  }
  for (const std::string& note : card.notes) text += "\nNote: " + note + ".\n";
  return text;
}

}  // namespace monograph
