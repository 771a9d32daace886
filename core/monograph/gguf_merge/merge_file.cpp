#include "monograph/gguf_merge/merge_file.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/gguf/decode_blocks.h"
#include "monograph/gguf/encode_blocks.h"
#include "monograph/gguf/row_order.h"
#include "monograph/gguf_merge/round_blocks.h"
#include "monograph/merge/measure.h"
#include "monograph/merge/panels.h"
#include "monograph/merge/round.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using text::in_quotes;

constexpr std::uint64_t kCopyBytes = std::uint64_t{4} << 20;

bool is_float(TensorType type) { return info_of(type).block_elements == 1; }

bool has_eight_bits(TensorType type) { return type == TensorType::kQ8; }

bool is_expert(const ImportedTensor& tensor) { return tensor.info->shape.size() == 3; }

// "model.layers.0.mlp.experts.*.up_proj.weight" for an expert of a stack.
std::string name_of_all(const ImportedTensor& tensor) {
  if (!is_expert(tensor)) return tensor.name;
  constexpr std::string_view kExperts = ".experts.";
  const std::size_t begin = tensor.name.rfind(kExperts) + kExperts.size();
  return tensor.name.substr(0, begin) + "*" + tensor.name.substr(tensor.name.find('.', begin));
}

class Runner {
 public:
  Runner(const FileReader& file, BlockRounding rounding, FileWriter& writer,
         ParallelFor parallel_for, FunctionRef<void(std::uint64_t)> done)
      : file_(file),
        rounding_(rounding),
        writer_(writer),
        parallel_for_(parallel_for),
        done_(done) {}

  void copy(std::size_t tensor) {
    const auto bytes = file_.bytes(file_.header().tensors[tensor]);
    const std::size_t pieces = (bytes.size() + kCopyBytes - 1) / kCopyBytes;
    parallel_for_(pieces, 1, [&](std::size_t piece, std::size_t end) {
      for (; piece < end; ++piece) {
        const std::uint64_t at = piece * kCopyBytes;
        const auto part = bytes.subspan(at, std::min<std::uint64_t>(kCopyBytes, bytes.size() - at));
        writer_.write(tensor, at, part);
        done_(part.size());
      }
    });
  }

  // Experts of a stack that nothing changes, by their first rows.
  void copy_others(std::size_t index, const std::set<std::uint64_t>& merged) {
    const TensorInfo& info = file_.header().tensors[index];
    const std::uint64_t each = info.shape[1] * size_bytes(info.type, info.shape[2]);
    for (std::uint64_t expert = 0; expert < info.shape[0]; ++expert) {
      if (merged.contains(expert * info.shape[1])) continue;
      writer_.write(index, expert * each, file_.bytes(info).subspan(expert * each, each));
      done_(each);
    }
  }

  Survival merge(std::size_t index, const ImportedTensor& tensor, const MergedWeight& weight) {
    const MergedPanels panels(weight, {}, parallel_for_);
    const Measure measure(weight, panels, 0, parallel_for_);
    FeedbackRows feedback{panels.cols(), 0, {}, {}};
    if (feeds_back(tensor.info->type) && measure.directions().count() != 0) {
      feedback = feedback_along(measure.directions(), nullptr);
    }
    std::vector<Survival> survivals(panels.panels());
    parallel_for_(panels.panels(), 1, [&](std::size_t panel, std::size_t end) {
      std::vector<float> base;
      std::vector<double> merged;
      for (; panel < end; ++panel) {
        const std::size_t first = panels.first_row(panel), last = panels.last_row(panel);
        panels.read_base(first, last, base);
        panels.merge(first, last, base, merged);
        const std::vector<float> stored =
            write_rows(index, tensor, weight, first, feedback, base, merged);
        panels.check_stored(first, info_of(tensor.info->type).name, merged, stored);
        survivals[panel] = measure(first, base, merged, stored);
      }
    });
    Survival whole;
    for (const Survival& survival : survivals) whole += survival;
    return whole;
  }

 private:
  bool feeds_back(TensorType type) const {
    if (is_float(type) || rounding_ == BlockRounding::kNearest) return false;
    return rounding_ == BlockRounding::kAdapter || !has_eight_bits(type);
  }

  // What is stored of rows from `first` on, in the order of `merged`.
  std::vector<float> write_rows(std::size_t index, const ImportedTensor& tensor,
                                const MergedWeight& weight, std::size_t first,
                                const FeedbackRows& feedback, const std::vector<float>& base,
                                const std::vector<double>& merged) {
    const TensorType type = tensor.info->type;
    const std::size_t cols = tensor.shape.back(), rows = merged.size() / cols;
    const std::uint64_t row_bytes = size_bytes(type, cols);
    const auto bytes = file_.bytes(*tensor.info);
    const bool one_row = tensor.shape.size() == 1;
    std::vector<float> stored(merged.size());
    std::vector<std::uint8_t> out(row_bytes);
    for (std::size_t i = 0; i < rows; ++i) {
      const std::span<const double> wanted(merged.data() + i * cols, cols);
      float* found = stored.data() + i * cols;
      const bool turned = tensor.permuted_head_rows != 0 && !one_row;
      const std::uint64_t row =
          turned ? stored_row(first + i, tensor.permuted_head_rows) : first + i;
      const std::uint64_t at = (tensor.first_row + row) * row_bytes;
      if (is_float(type)) {
        store_floats(tensor, wanted, out, found);
      } else {
        check(type, weight, first + i, wanted);
        round_blocks(type, bytes.subspan(at, row_bytes), {base.data() + i * cols, cols}, wanted,
                     feedback, out.data());
        decode(type, out.data(), cols / info_of(type).block_elements, found);
      }
      writer_.write(index, at, out);
      done_(out.size());
    }
    return stored;
  }

  // A vector may have its elements in the order of rows, and a one added.
  static void store_floats(const ImportedTensor& tensor, std::span<const double> wanted,
                           std::vector<std::uint8_t>& out, float* found) {
    const TensorType type = tensor.info->type;
    const std::uint64_t width = info_of(type).block_bytes;
    const bool turned = tensor.permuted_head_rows != 0 && tensor.shape.size() == 1;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const double value = tensor.subtract_one ? wanted[i] + 1 : wanted[i];
      const float odd = type == TensorType::kF32 ? round_to<float>(value) : round_to_odd(value);
      const std::uint64_t place = turned ? stored_row(i, tensor.permuted_head_rows) : i;
      encode(type, &odd, 1, out.data() + place * width);
      decode(type, out.data() + place * width, 1, found + i);
      if (tensor.subtract_one) found[i] -= 1;
    }
  }

  void check(TensorType type, const MergedWeight& weight, std::size_t row,
             std::span<const double> wanted) const {
    const auto most = static_cast<double>(largest_magnitude(type));
    const auto bad = std::find_if(wanted.begin(), wanted.end(),
                                  [&](double value) { return std::fabs(value) > most; });
    if (bad == wanted.end()) return;
    throw Error(file_.path().string() + ": weight " + in_quotes(weight.name) + ": " +
                std::to_string(*bad) + " in row " + std::to_string(row) + ", " +
                std::string(info_of(type).name) + " holds numbers up to " + std::to_string(most));
  }

  const FileReader& file_;
  BlockRounding rounding_;
  FileWriter& writer_;
  ParallelFor parallel_for_;
  FunctionRef<void(std::uint64_t)> done_;
};

}  // namespace

void check_merge(const MergePlan& plan, const FileReader& file) {
  const std::string source = file.path().string() + ": ";
  if (plan.vocabulary != 0) {
    throw Error(
        source + "the adapter has rows of new tokens, " + std::to_string(plan.vocabulary) +
        " in all; wanted the tokens of the file: monograph dequantize makes a folder of it");
  }
  if (plan.unties_head) {
    throw Error(source + "its table of tokens is its head too, and the adapter changes one of " +
                "both; monograph dequantize makes a folder of it");
  }
  for (const MergedWeight& weight : plan.weights) {
    if (!weight.is_changed()) continue;
    if (weight.experts != 0) {
      throw Error(
          source + "weight " + in_quotes(weight.name) + ": is a stack of experts, of which " +
          "LoRA alone is merged into a GGUF file; monograph dequantize makes a folder of it");
    }
  }
}

FilePlan same_file(const FileReader& file) {
  FilePlan plan;
  const auto header = file.all_bytes().first(file.header().data_offset_bytes);
  plan.header.assign(reinterpret_cast<const char*>(header.data()), header.size());
  plan.tensors = file.header().tensors;
  plan.size_bytes = file.all_bytes().size();
  return plan;
}

std::vector<MergeRow> write_merge(const MergePlan& plan, const ImportPlan& imported,
                                  const FileReader& file, BlockRounding rounding,
                                  FileWriter& writer, ParallelFor parallel_for,
                                  FunctionRef<void(std::uint64_t)> done) {
  std::map<std::string_view, const MergedWeight*> weights;
  for (const MergedWeight& weight : plan.weights) {
    if (weight.is_changed()) weights.emplace(weight.name, &weight);
  }
  std::map<const TensorInfo*, std::vector<const ImportedTensor*>> changed;
  std::size_t found = 0;
  for (const ImportedTensor& tensor : imported.tensors) {
    if (!weights.contains(tensor.name)) continue;
    changed[tensor.info].push_back(&tensor);
    ++found;
  }
  if (found != weights.size()) throw Error(file.path().string() + ": a weight is no tensor");
  Runner runner(file, rounding, writer, parallel_for, done);
  std::vector<MergeRow> rows;
  const std::vector<TensorInfo>& tensors = file.header().tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto parts = changed.find(&tensors[i]);
    if (parts == changed.end()) {
      runner.copy(i);
      continue;
    }
    Survival whole;
    std::set<std::uint64_t> merged;
    for (const ImportedTensor* tensor : parts->second) {
      whole += runner.merge(i, *tensor, *weights.at(tensor->name));
      merged.insert(tensor->first_row);
    }
    if (is_expert(*parts->second.front())) runner.copy_others(i, merged);
    const MergedWeight& first = *weights.at(parts->second.front()->name);
    rows.push_back({name_of_all(*parts->second.front()), first.change(),
                    std::string(info_of(tensors[i].type).name), whole});
  }
  std::sort(rows.begin(), rows.end(),
            [](const MergeRow& a, const MergeRow& b) { return a.name < b.name; });
  return rows;
}

}  // namespace monograph::gguf
