#include "monograph/gguf/import.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstring>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/cpu/parallel.h"
#include "monograph/gguf/names.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/weight.h"

namespace monograph::gguf {
namespace {

using text::in_quotes;

// 4 MiB in fp32.
constexpr std::uint64_t kPieceElements = 1 << 20;
// llama.cpp has 512.
constexpr std::uint64_t kMaxExperts = 65'536;

class Planner {
 public:
  explicit Planner(const FileReader& file) : file_(file), header_(file.header()) {
    const std::string_view name = header_.architecture();
    const PairView* experts = header_.find(std::string(name) + ".expert_count");
    architecture_ = find_named_architecture(name, experts != nullptr && experts->whole() != 0);
    if (architecture_ == nullptr) {
      fail("general.architecture " + in_quotes(name) + ": transformers' names are known for " +
           architecture_names());
    }
    // Once: a hostile file has a million tensors and a million pairs.
    heads_ = header_.find(std::string(name) + ".attention.head_count");
    kv_heads_ = header_.find(std::string(name) + ".attention.head_count_kv");
    if (kv_heads_ == nullptr) kv_heads_ = heads_;  // as many for keys as for queries
    const PairView* length = header_.find(std::string(name) + ".attention.key_length");
    if (length != nullptr) length_ = length->whole().value_or(0);
  }

  ImportPlan make() {
    check_whole();
    for (const TensorInfo& info : header_.tensors) {
      if (info.name == "rope_freqs.weight" || info.name.starts_with("rope_factors_")) {
        plan_.left_out.push_back(info.name);
      } else {
        add(info);
      }
    }
    return std::move(plan_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(file_.path().string() + ": " + what);
  }

  // A part of a model under the names of a whole one would be taken for it.
  void check_whole() const {
    const PairView* parts = header_.find("split.count");
    if (parts != nullptr && parts->whole().value_or(2) > 1) {
      fail("is one of " +
           (parts->whole() ? std::to_string(*parts->whole()) : std::string("several")) +
           " parts (split.count), wanted one file: llama-gguf-split --merge makes it");
    }
    const PairView* blocks = header_.find(std::string(header_.architecture()) + ".block_count");
    std::uint64_t layers = 0;
    for (const TensorInfo& info : header_.tensors) layers = std::max(layers, layers_up_to(info));
    if (blocks != nullptr && blocks->whole() != layers) {
      fail("has tensors of " + std::to_string(layers) + " layers, " + std::string(blocks->key) +
           " says " + std::to_string(blocks->whole().value_or(0)));
    }
    const PairView* all = header_.find("split.tensors.count");
    if (all != nullptr && all->whole() != header_.tensors.size()) {
      fail("has " + std::to_string(header_.tensors.size()) + " tensors, split.tensors.count says " +
           std::to_string(all->whole().value_or(0)));
    }
  }

  // 3 for a tensor of "blk.2.", 0 for others.
  static std::uint64_t layers_up_to(const TensorInfo& info) {
    constexpr std::string_view kBlock = "blk.";
    if (!info.name.starts_with(kBlock)) return 0;
    std::uint64_t layer = 0;
    const char* begin = info.name.data() + kBlock.size();
    const auto read = std::from_chars(begin, info.name.data() + info.name.size(), layer);
    return read.ec == std::errc() && layer < kMaxTensors ? layer + 1 : 0;
  }

  void add(const TensorInfo& info) {
    const std::size_t dot = info.name.rfind('.');
    const std::string kind = dot == std::string::npos ? "" : info.name.substr(dot);
    std::optional<std::string> module;
    if (kind == ".weight" || kind == ".bias") {
      module = module_name(*architecture_, std::string_view(info.name).substr(0, dot));
    }
    if (!module) {
      fail("tensor " + in_quotes(info.name) + ": has no name in transformers' " +
           std::string(architecture_->model_type));
    }
    ImportedTensor tensor;
    tensor.info = &info;
    tensor.shape = info.shape;
    tensor.name = module->ends_with(".sinks") ? *module : *module + kind;
    // A row in transformers, a vector in the file.
    if (module->ends_with("shared_expert_gate") && tensor.shape.size() == 1) {
      tensor.shape.insert(tensor.shape.begin(), 1);
    }
    tensor.subtract_one =
        architecture_->name.starts_with("gemma") && info.name.ends_with("norm.weight");
    if (architecture_->rotates_neighbours) {
      if (info.name.find(".attn_q.") != std::string::npos) turn(tensor, heads_);
      if (info.name.find(".attn_k.") != std::string::npos) turn(tensor, kv_heads_);
    }
    if (const std::size_t star = tensor.name.find('*'); star != std::string::npos) {
      add_experts(tensor, star);
    } else {
      plan_.tensors.push_back(std::move(tensor));
    }
  }

  void turn(ImportedTensor& tensor, const PairView* pair) {
    if (pair != nullptr && !pair->whole()) {
      fail(std::string(pair->key) + " is of type " + std::string(name_of(pair->type)) +
           ", wanted one number for all layers");
    }
    const std::uint64_t heads = pair == nullptr ? 0 : pair->whole().value_or(0);
    const std::uint64_t rows = tensor.shape.front();
    if (heads == 0 || rows % heads != 0 || rows / heads % 2 != 0) {
      fail("tensor " + in_quotes(tensor.info->name) + ": " + std::to_string(rows) + " rows for " +
           std::to_string(heads) + " heads (" +
           (pair == nullptr ? "no attention.head_count" : std::string(pair->key)) +
           "), wanted an even number for each");
    }
    tensor.permuted_head_rows = rows / heads;
    if (head_rows_ == 0) head_rows_ = length_ == 0 ? rows / heads : length_;
    if (rows / heads != head_rows_) {
      fail("tensor " + in_quotes(tensor.info->name) + ": " + std::to_string(rows / heads) +
           " rows a head by " + std::string(pair->key) + " " + std::to_string(heads) +
           ", others or attention.key_length have " + std::to_string(head_rows_));
    }
  }

  void add_experts(const ImportedTensor& stack, std::size_t star) {
    const bool bias = stack.name.ends_with(".bias");
    if (stack.shape.size() != (bias ? 2 : 3) || stack.shape[0] > kMaxExperts) {
      fail("tensor " + in_quotes(stack.info->name) + ": " + std::to_string(stack.shape.size()) +
           " dimensions, the first " + std::to_string(stack.shape[0]) + ", wanted " +
           (bias ? "2" : "3") + ": at most " + std::to_string(kMaxExperts) + " experts, outputs" +
           (bias ? "" : ", inputs"));
    }
    if (experts_ == 0) {
      const PairView* pair = header_.find(std::string(header_.architecture()) + ".expert_count");
      experts_ = pair == nullptr ? stack.shape[0] : pair->whole().value_or(0);
    }
    if (stack.shape[0] != experts_) {
      fail("tensor " + in_quotes(stack.info->name) + ": " + std::to_string(stack.shape[0]) +
           " experts, expert_count or another tensor says " + std::to_string(experts_));
    }
    for (std::uint64_t expert = 0; expert < stack.shape[0]; ++expert) {
      ImportedTensor one = stack;
      one.first_row = bias ? expert : expert * stack.shape[1];
      one.shape.erase(one.shape.begin());
      one.name = stack.name.substr(0, star) + std::to_string(expert) + stack.name.substr(star + 1);
      plan_.tensors.push_back(std::move(one));
    }
  }

  const FileReader& file_;
  const FileHeader& header_;
  const Architecture* architecture_ = nullptr;
  const PairView *heads_ = nullptr, *kv_heads_ = nullptr;
  std::uint64_t length_ = 0;     // attention.key_length, or 0
  std::uint64_t head_rows_ = 0;  // of every q and k
  std::uint64_t experts_ = 0;    // of every stack
  ImportPlan plan_;
};

struct Piece {
  const ImportedTensor* tensor = nullptr;
  std::uint64_t begin = 0, end = 0;  // rows of the checkpoint's tensor
};

class Importer {
 public:
  Importer(const ImportPlan& plan, const FileReader& file, DType dtype,
           safetensors::ShardedWriter& writer, const ImportOptions& options)
      : file_(file), dtype_(dtype), writer_(writer), options_(options) {
    for (const ImportedTensor& tensor : plan.tensors) {
      const std::uint64_t rows = rows_of(tensor), cols = tensor.shape.back();
      // Of a transposed stack every row has an element of each row of the file: whole experts.
      const std::uint64_t step = tensor.stacked && tensor.shape.size() == 3
                                     ? tensor.shape[1]
                                     : std::max<std::uint64_t>(kPieceElements / cols, 1);
      for (std::uint64_t begin = 0; begin < rows; begin += step) {
        pieces_.push_back({&tensor, begin, std::min(begin + step, rows)});
      }
    }
  }

  void run() {
    ThreadPool pool(std::max(options_.threads, 1));
    pool.parallel_for(static_cast<std::size_t>(pool.threads()), 1,
                      [this](std::size_t, std::size_t) { work(); });
  }

 private:
  void work() {
    std::vector<float> values;
    std::vector<std::uint8_t> out;
    try {
      for (;;) {
        const std::size_t index = next_++;
        if (index >= pieces_.size() || stop_) return;
        read(pieces_[index], values);
        write(pieces_[index], values, out);
      }
    } catch (...) {
      stop_ = true;
      throw;
    }
  }

  void read(const Piece& piece, std::vector<float>& values) const {
    values.resize((piece.end - piece.begin) * piece.tensor->shape.back());
    read_rows(file_, *piece.tensor, piece.begin, piece.end, values.data());
  }

  void write(const Piece& piece, const std::vector<float>& values, std::vector<std::uint8_t>& out) {
    switch (dtype_) {
      case DType::kFloat32:
        store<float>(piece, values, out);
        break;
      case DType::kFloat16:
        store<Fp16>(piece, values, out);
        break;
      case DType::kBFloat16:
        store<Bf16>(piece, values, out);
        break;
    }
    const std::uint64_t width = out.size() / values.size();
    writer_.write(piece.tensor->name, piece.begin * piece.tensor->shape.back() * width, out);
    const TensorTypeInfo& type = info_of(piece.tensor->info->type);
    options_.advance(values.size() / type.block_elements * type.block_bytes);
  }

  template <class T>
  void store(const Piece& piece, const std::vector<float>& values, std::vector<std::uint8_t>& out) {
    out.resize(values.size() * sizeof(T));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const T stored = from_float<T>(values[i]);
      if (!std::isfinite(to_float(stored))) fail(piece, i, values[i]);
      std::memcpy(out.data() + i * sizeof(T), &stored, sizeof stored);
    }
  }

  [[noreturn]] void fail(const Piece& piece, std::size_t index, float value) const {
    const std::uint64_t cols = piece.tensor->shape.back();
    throw Error(file_.path().string() + ": tensor " + in_quotes(piece.tensor->info->name) + ": " +
                std::to_string(value) + " for row " + std::to_string(piece.begin + index / cols) +
                ", column " + std::to_string(index % cols) + " of " +
                in_quotes(piece.tensor->name) + ", wanted a number that " +
                std::string(name_of(dtype_)) + " holds");
  }

  const FileReader& file_;
  DType dtype_;
  safetensors::ShardedWriter& writer_;
  const ImportOptions& options_;
  std::vector<Piece> pieces_;
  std::atomic<std::size_t> next_ = 0;
  std::atomic<bool> stop_ = false;
};

}  // namespace

ImportPlan plan_import(const FileReader& file) { return Planner(file).make(); }

std::vector<safetensors::TensorSpec> specs_of(const ImportPlan& plan, DType dtype) {
  std::vector<safetensors::TensorSpec> specs;
  for (const ImportedTensor& tensor : plan.tensors) {
    specs.push_back({tensor.name, stored(dtype), tensor.shape});
  }
  return specs;
}

void write_import(const ImportPlan& plan, const FileReader& file, DType dtype,
                  safetensors::ShardedWriter& writer, const ImportOptions& options) {
  Importer(plan, file, dtype, writer, options).run();
}

}  // namespace monograph::gguf
