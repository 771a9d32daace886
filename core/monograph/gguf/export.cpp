#include "monograph/gguf/export.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <mutex>

#include "monograph/base/error.h"
#include "monograph/cpu/parallel.h"
#include "monograph/gguf/encode_blocks.h"
#include "monograph/gguf/mxfp4_blocks.h"
#include "monograph/gguf/row_order.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/page_advice.h"

namespace monograph::gguf {
namespace {

// 4 MiB in fp32: large against a system call, small against memory.
constexpr std::uint64_t kPieceElements = 1 << 20;

// Rows of a tensor.
struct Piece {
  std::size_t tensor = 0;
  std::uint64_t begin = 0, end = 0;
};

// Of one tensor, made by the thread that comes first and dropped by the one that is last.
struct Encoder {
  std::mutex mutex;
  bool made = false;
  std::size_t pieces_left = 0;
  std::shared_ptr<const RowEncoder> encoder;
};

struct Scratch {
  std::vector<float> values, run;
  std::vector<std::uint8_t> out;
};

class Exporter {
 public:
  Exporter(const ExportPlan& plan, FileWriter& writer, const ExportOptions& options)
      : plan_(plan), writer_(writer), options_(options) {
    for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
      const std::uint64_t rows = rows_of(plan.tensors[i]);
      const std::uint64_t step =
          std::max<std::uint64_t>(kPieceElements / plan.tensors[i].info.shape.back(), 1);
      for (std::uint64_t begin = 0; begin < rows; begin += step) {
        pieces_.push_back({i, begin, std::min(begin + step, rows)});
      }
      encoders_.emplace_back().pieces_left = (rows + step - 1) / step;
    }
  }

  void run() {
    ThreadPool pool(std::max(options_.threads, 1));
    pool.parallel_for(static_cast<std::size_t>(pool.threads()), 1,
                      [this](std::size_t, std::size_t) { work(); });
  }

 private:
  void work() {
    Scratch scratch;
    try {
      for (;;) {
        const std::size_t index = next_++;
        if (index >= pieces_.size() || stop_) return;
        do_piece(pieces_[index], scratch);
      }
    } catch (...) {
      stop_ = true;
      throw;
    }
  }

  void do_piece(const Piece& piece, Scratch& scratch) {
    const ExportedTensor& tensor = plan_.tensors[piece.tensor];
    const std::uint64_t cols = tensor.info.shape.back();
    const std::uint64_t count = (piece.end - piece.begin) * cols;
    read(tensor, piece, scratch);
    if (tensor.weight != nullptr) check(tensor, piece, scratch.values);
    scratch.out.resize(size_bytes(tensor.info.type, count));
    if (tensor.keeps_blocks) {
      copy_blocks(tensor, piece, scratch.out.data());
    } else if (const auto encoder = encoder_of(piece.tensor)) {
      encoder->encode(tensor.info.type, scratch.values, scratch.out.data());
    } else {
      encode(tensor.info.type, scratch.values.data(), count, scratch.out.data());
    }
    end_piece(piece.tensor);
    writer_.write(piece.tensor, size_bytes(tensor.info.type, piece.begin * cols), scratch.out);
    options_.advance(scratch.out.size());
  }

  std::shared_ptr<const RowEncoder> encoder_of(std::size_t tensor) {
    Encoder& own = encoders_[tensor];
    const std::lock_guard lock(own.mutex);
    if (!own.made) own.encoder = options_.encoder_of(plan_.tensors[tensor]);
    own.made = true;
    return own.encoder;
  }

  void end_piece(std::size_t tensor) {
    Encoder& own = encoders_[tensor];
    const std::lock_guard lock(own.mutex);
    if (--own.pieces_left == 0) own.encoder.reset();
  }

  static void read(const ExportedTensor& tensor, const Piece& piece, Scratch& scratch) {
    if (tensor.weight == nullptr) {
      scratch.values = tensor.values;
      return;
    }
    const std::uint64_t cols = tensor.info.shape.back();
    scratch.values.resize((piece.end - piece.begin) * cols);
    if (tensor.rows_of_experts.all != 0) {
      tensor.info.shape.size() == 3 ? read_experts(tensor, piece, scratch)
                                    : read_biases(tensor, piece, scratch.values);
    } else if (tensor.permuted_head_rows == 0) {
      read_values(*tensor.weight, piece.begin * cols, piece.end * cols, scratch.values.data());
      release_around(*tensor.weight, piece.begin * cols, piece.end * cols);
    } else if (tensor.info.shape.size() == 1) {
      read_permuted_vector(tensor, scratch.values);
    } else {
      for (std::uint64_t row = piece.begin; row < piece.end; ++row) {
        const std::uint64_t from = source_row(row, tensor.permuted_head_rows);
        read_values(*tensor.weight, from * cols, (from + 1) * cols,
                    scratch.values.data() + (row - piece.begin) * cols);
      }
      // Rows of the last head may be read again: its pages are then mapped once more.
      release_around(*tensor.weight, piece.begin * cols, piece.end * cols);
    }
    if (!tensor.add_one) return;
    for (float& value : scratch.values) value += 1;
  }

  // Runs of rows that one expert has. Those between them are read as well: the elements of a
  // transposed stack lie beside each other by columns.
  static void read_experts(const ExportedTensor& tensor, const Piece& piece, Scratch& scratch) {
    const std::uint64_t rows = tensor.info.shape[1], cols = tensor.info.shape.back();
    const RowsOfExperts& of = tensor.rows_of_experts;
    float* out = scratch.values.data();
    for (std::uint64_t row = piece.begin; row < piece.end;) {
      const std::uint64_t end = std::min(piece.end, (row / rows + 1) * rows);
      const std::uint64_t from = row / rows * of.all + of.first + row % rows * of.step;
      const std::uint64_t count = (end - row - 1) * of.step + 1;
      std::vector<float>& run = scratch.run;
      run.resize(of.step == 1 ? 0 : count * cols);
      read_values(*tensor.weight, from * cols, (from + count) * cols,
                  of.step == 1 ? out : run.data());
      release_around(*tensor.weight, from * cols, (from + count) * cols);
      for (std::uint64_t i = 0; of.step != 1 && i < end - row; ++i) {
        std::copy_n(run.data() + i * of.step * cols, cols, out + i * cols);
      }
      out += (end - row) * cols;
      row = end;
    }
  }

  // A bias of experts: a row of it is one expert.
  static void read_biases(const ExportedTensor& tensor, const Piece& piece,
                          std::vector<float>& values) {
    const RowsOfExperts& of = tensor.rows_of_experts;
    const std::uint64_t cols = tensor.info.shape.back();
    std::vector<float> all(of.all);
    for (std::uint64_t expert = piece.begin; expert < piece.end; ++expert) {
      read_values(*tensor.weight, expert * of.all, (expert + 1) * of.all, all.data());
      for (std::uint64_t i = 0; i < cols; ++i) {
        values[(expert - piece.begin) * cols + i] = all[of.first + i * of.step];
      }
    }
  }

  static void copy_blocks(const ExportedTensor& tensor, const Piece& piece, std::uint8_t* out) {
    const std::uint64_t cols = tensor.info.shape.back();
    const RowsOfExperts& of = tensor.rows_of_experts;
    for (std::uint64_t row = piece.begin; row < piece.end; ++row) {
      std::uint64_t from = row;
      if (of.all != 0) {
        const std::uint64_t rows = tensor.info.shape[1];
        from = row / rows * of.all + of.first + row % rows * of.step;
      }
      copy_mxfp4_blocks(*tensor.weight, from * cols, (from + 1) * cols, out);
      out += size_bytes(tensor.info.type, cols);
    }
  }

  // A bias: its elements are rows.
  static void read_permuted_vector(const ExportedTensor& tensor, std::vector<float>& values) {
    std::vector<float> source(values.size());
    read_values(*tensor.weight, 0, source.size(), source.data());
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = source[source_row(i, tensor.permuted_head_rows)];
    }
  }

  static void check(const ExportedTensor& tensor, const Piece& piece,
                    const std::vector<float>& values) {
    const float limit = largest_magnitude(tensor.info.type);
    const auto bad = std::find_if(values.begin(), values.end(),
                                  [&](float value) { return !(std::fabs(value) <= limit); });
    if (bad == values.end()) return;
    // Plain floats can hold NaN and infinities; a model that has them is broken all the same.
    const auto index = static_cast<std::uint64_t>(bad - values.begin());
    const std::uint64_t cols = tensor.info.shape.back();
    std::uint64_t row = piece.begin + index / cols;
    std::string expert;
    if (tensor.info.shape.size() == 3) {
      expert = " of expert " + std::to_string(row / tensor.info.shape[1]);
      row %= tensor.info.shape[1];
    }
    throw Error("weight " + text::in_quotes(tensor.weight->name) + ": " +
                text::in_quotes(tensor.info.name) + " has " + std::to_string(*bad) + " in row " +
                std::to_string(row) + ", column " + std::to_string(index % cols) + expert + ", " +
                std::string(info_of(tensor.info.type).name) + " holds numbers up to " +
                std::to_string(limit));
  }

  const ExportPlan& plan_;
  FileWriter& writer_;
  const ExportOptions& options_;
  std::vector<Piece> pieces_;
  std::deque<Encoder> encoders_;  // by tensor
  std::atomic<std::size_t> next_ = 0;
  std::atomic<bool> stop_ = false;
};

}  // namespace

void write_export(const ExportPlan& plan, const FilePlan& file, const std::filesystem::path& target,
                  std::span<const files::FileId> inputs, const ExportOptions& options) {
  FileWriter writer(target, file, inputs);
  Exporter(plan, writer, options).run();
  writer.finish();
}

}  // namespace monograph::gguf
