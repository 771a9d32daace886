#include "monograph/convert/convert.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/convert/stacked_copy.h"
#include "monograph/convert/turn_words.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/composed_weight.h"
#include "monograph/weights/page_advice.h"

namespace monograph {
namespace {

using safetensors::LocatedTensor;
using safetensors::ShardedWriter;
using safetensors::StoredDType;
using safetensors::TensorSpec;

// A multiple of every block. 8 MiB of bf16: large against a system call, small against memory.
constexpr std::uint64_t kPieceElements = 1 << 22;
constexpr std::uint64_t kPieceBytes = 1 << 23;

std::span<const std::uint8_t> as_bytes(const void* data, std::size_t size) {
  return {static_cast<const std::uint8_t*>(data), size};
}

// One weight in work: shared by the threads that have its pieces.
struct Job {
  const Conversion* conversion = nullptr;
  std::atomic<std::uint64_t> left = 0;
  // Of kQuantize.
  std::optional<PackedLayout> layout;
  PackedScales scales;  // from the first piece begun to the last one done
  bool has_scales = false;
  // For a format with a scale of a whole matrix: the pieces still to be searched for the largest
  // magnitude, and what was found in each matrix.
  std::uint64_t unsearched = 0;
  std::vector<float> largest;
};

// A range of elements, or of bytes of one part for a copy.
struct Piece {
  Job* job = nullptr;
  const LocatedTensor* part = nullptr;
  std::uint64_t begin = 0, end = 0;
  bool search = false;  // for the largest magnitude, before the pieces that quantise
  // Of a copy: where it goes.
  std::string to = {};
  std::uint64_t to_offset = 0;
};

// The bytes of the values that a piece reads, at least.
std::vector<MappedBytes> sources_of(const Piece& piece) {
  if (piece.part != nullptr) {
    return {piece.part->bytes().subspan(piece.begin, piece.end - piece.begin)};
  }
  return source_pages(*piece.job->conversion->weight, piece.begin, piece.end);
}

// The part of source_bytes() that falls to a piece.
std::uint64_t progress_of(const Piece& piece) {
  if (piece.part != nullptr) return piece.end - piece.begin;
  const Conversion& conversion = *piece.job->conversion;
  const auto total = static_cast<double>(source_bytes(conversion));
  const auto elements =
      static_cast<double>(std::max<std::uint64_t>(conversion.weight->elements, 1));
  const auto at = [&](std::uint64_t element) {
    return static_cast<std::uint64_t>(total * (static_cast<double>(element) / elements));
  };
  return at(piece.end) - at(piece.begin);
}

// What a thread keeps from piece to piece.
struct Scratch {
  std::vector<float> decoded;  // floats of any width: allocated as the widest
  std::vector<std::uint8_t> out;
};

class Converter {
 public:
  Converter(std::span<const Conversion> conversions, ShardedWriter& writer,
            const ConvertOptions& options)
      : writer_(writer), options_(options) {
    for (const Conversion& conversion : conversions) add(conversion);
  }

  void run() {
    ThreadPool pool(std::max(options_.threads, 1));
    pool.parallel_for(static_cast<std::size_t>(pool.threads()), 1,
                      [this](std::size_t, std::size_t) { work(); });
  }

 private:
  void add(const Conversion& conversion) {
    Job& job = *jobs_.emplace_back(std::make_unique<Job>());
    job.conversion = &conversion;
    const std::size_t first = pieces_.size();
    if (conversion.action == Action::kCopy && conversion.weight->composed) {
      copy_stacked(job);
    } else if (conversion.action == Action::kCopy) {
      for (const Part& part : conversion.weight->parts) {
        cut(job, &part.tensor, part.tensor.entry->size_bytes, kPieceBytes);
      }
    } else if (conversion.action == Action::kQuantize) {
      job.layout.emplace(conversion);
      add_quantize(job);
      job.left = pieces_.size() - first - job.unsearched;
    } else if (conversion.action == Action::kTurn) {
      // Whole rows, eight at a time.
      const std::uint64_t row = conversion.words->inputs;
      cut(job, nullptr, conversion.weight->elements, ceil_div(kPieceElements, 8 * row) * 8 * row);
    } else {
      cut(job, nullptr, conversion.weight->elements, kPieceElements);
      if (conversion.weight->elements == 0) pieces_.push_back({&job, nullptr, 0, 0});
    }
  }

  void add_quantize(Job& job) {
    if (job.layout->info().tensor_scale != TensorScale::kNone) {
      const std::size_t first = pieces_.size();
      cut_matrices(job);
      for (std::size_t i = first; i < pieces_.size(); ++i) pieces_[i].search = true;
      job.unsearched = pieces_.size() - first;
      job.largest.resize(job.layout->matrices());
    }
    cut_matrices(job);
    // Its other parts are written even if it is empty.
    if (job.layout->elements() == 0) pieces_.push_back({&job, nullptr, 0, 0});
  }

  void copy_stacked(Job& job) {
    for (const StackedPart& part : stacked_parts(*job.conversion)) {
      if (!part.text.empty()) {
        writer_.write(part.spec.name, 0, as_bytes(part.text.data(), part.text.size()));
      }
      std::uint64_t offset = 0;
      for (const LocatedTensor& source : part.sources) {
        const LocatedTensor& kept = copied_.emplace_back(source);
        const std::size_t first = pieces_.size();
        cut(job, &kept, kept.entry->size_bytes, kPieceBytes);
        for (std::size_t i = first; i < pieces_.size(); ++i) {
          pieces_[i].to = part.spec.name;
          pieces_[i].to_offset = offset + pieces_[i].begin;
        }
        offset += kept.entry->size_bytes;
      }
    }
  }

  void cut_matrices(Job& job) {
    const std::uint64_t step = job.layout->range(kPieceElements);
    const std::uint64_t matrix = job.layout->matrix_elements();
    for (std::uint64_t i = 0; i < job.layout->matrices(); ++i) {
      const std::size_t first = pieces_.size();
      cut(job, nullptr, matrix, step);
      for (std::size_t at = first; at < pieces_.size(); ++at) {
        pieces_[at].begin += i * matrix;
        pieces_[at].end += i * matrix;
      }
    }
  }

  void cut(Job& job, const LocatedTensor* part, std::uint64_t count, std::uint64_t step) {
    for (std::uint64_t begin = 0; begin < count; begin += step) {
      pieces_.push_back({&job, part, begin, std::min(begin + step, count)});
    }
  }

  void work() {
    Scratch scratch;
    const std::size_t ahead = 2 * static_cast<std::size_t>(std::max(options_.threads, 1));
    try {
      for (;;) {
        const std::size_t index = next_++;
        if (index >= pieces_.size() || stop_) return;
        if (index + ahead < pieces_.size()) prefetch_pages(sources_of(pieces_[index + ahead]));
        do_piece(pieces_[index], scratch);
      }
    } catch (...) {
      stop_ = true;
      const std::lock_guard lock(mutex_);
      searched_.notify_all();
      throw;
    }
  }

  void do_piece(const Piece& piece, Scratch& scratch) {
    if (piece.search) return search_piece(piece, scratch);
    const std::vector<MappedBytes> sources = sources_of(piece);
    switch (piece.job->conversion->action) {
      case Action::kCopy:
        if (piece.to.empty()) {
          writer_.write(piece.part->entry->name, piece.begin, sources.front());
        } else {
          writer_.write(piece.to, piece.to_offset, sources.front());
        }
        break;
      case Action::kQuantize:
        quantize_piece(piece, scratch);
        break;
      case Action::kCast:
        cast_piece(piece, scratch);
        break;
      case Action::kTurn:
        turn_piece(piece, scratch);
        break;
    }
    release_pages(sources);
    options_.advance(progress_of(piece));
  }

  // The elements of a piece in a float type: in place if they lie there aligned, else decoded.
  const void* input_of(const Piece& piece, DType dtype, Scratch& scratch) {
    const Weight& weight = *piece.job->conversion->weight;
    if (!weight.composed && !weight.is_packed() && weight.dtype == stored(dtype)) {
      const std::uint8_t* at =
          weight.parts.front().tensor.bytes().data() + piece.begin * size_bytes(dtype);
      if (reinterpret_cast<std::uintptr_t>(at) % size_bytes(dtype) == 0) return at;
    }
    scratch.decoded.resize(std::max(kPieceElements, piece.end - piece.begin));
    read_elements(weight, piece.begin, piece.end, dtype, scratch.decoded.data());
    return scratch.decoded.data();
  }

  void quantize_piece(const Piece& piece, Scratch& scratch) {
    Job& job = *piece.job;
    const Conversion& conversion = *job.conversion;
    const Weight& weight = *conversion.weight;
    const PackedLayout& layout = *job.layout;
    if (!make_scales(job)) return;
    const std::uint64_t count = piece.end - piece.begin;
    scratch.out.resize(layout.value_bytes(count));
    const DType dtype = source_dtype(weight);
    const QuantizeJob work =
        layout.job(dtype, input_of(piece, dtype, scratch), count, scratch.out.data(),
                   job.scales.at(layout, layout.block_at(piece.begin)),
                   job.scales.zeros_at(layout.block_at(piece.begin)),
                   &job.scales.tensor_at(layout, piece.begin));
    if (const auto bad = quantize(work, serial_for)) fail_nonfinite(weight, piece.begin + *bad);
    writer_.write(values_name(conversion), layout.value_bytes(piece.begin), scratch.out);
    if (--job.left == 0) {
      write_packed_parts(conversion, job.scales, writer_);
      job.scales = {};
    }
  }

  // False if the work has ended.
  bool make_scales(Job& job) {
    std::unique_lock lock(mutex_);
    // Pieces are begun in order: those that search are done or in work.
    searched_.wait(lock, [&] { return stop_ || job.unsearched == 0; });
    if (stop_ || job.has_scales) return !stop_;
    const FormatInfo& info = job.layout->info();
    job.scales.make_room(*job.layout);
    for (std::size_t i = 0; i < job.largest.size(); ++i) {
      job.scales.tensors[i] = tensor_scales_for(info.kernels, job.layout->rule(), job.largest[i]);
    }
    job.has_scales = true;
    return true;
  }

  void search_piece(const Piece& piece, Scratch& scratch) {
    Job& job = *piece.job;
    const DType dtype = source_dtype(*job.conversion->weight);
    const float found =
        largest_magnitude(dtype, input_of(piece, dtype, scratch), piece.end - piece.begin);
    const std::lock_guard lock(mutex_);
    float& largest = job.largest[piece.begin / job.layout->matrix_elements()];
    largest = std::max(largest, found);
    if (--job.unsearched == 0) searched_.notify_all();
  }

  void cast_piece(const Piece& piece, Scratch& scratch) {
    const Conversion& conversion = *piece.job->conversion;
    const Weight& weight = *conversion.weight;
    const std::uint64_t count = piece.end - piece.begin;
    const void* data = input_of(piece, conversion.dtype, scratch);
    if (conversion.dtype == DType::kFloat16) check_overflow(weight, piece, data);
    writer_.write(weight.name, piece.begin * size_bytes(conversion.dtype),
                  as_bytes(data, count * size_bytes(conversion.dtype)));
  }

  void turn_piece(const Piece& piece, Scratch& scratch) {
    const Conversion& conversion = *piece.job->conversion;
    const WordLayout& words = *conversion.words;
    const std::uint64_t first = piece.begin / words.inputs, end = piece.end / words.inputs;
    const std::uint64_t row_bytes = words.inputs * words.bits / 8;
    scratch.out.resize((end - first) * row_bytes);
    turn_rows(*conversion.weight, words, first, end - first, scratch.out.data());
    writer_.write(turned_specs(conversion).front().name, first * row_bytes, scratch.out);
    if (first == 0) write_turned_parts(conversion, writer_);
  }

  // An infinity where the source has a number.
  static void check_overflow(const Weight& weight, const Piece& piece, const void* data) {
    const auto* halves = static_cast<const std::uint8_t*>(data);
    for (std::uint64_t i = 0; i < piece.end - piece.begin; ++i) {
      if ((halves[2 * i + 1] & 0x7f) != 0x7c || halves[2 * i] != 0) continue;
      float value = 0;
      read_elements(weight, piece.begin + i, piece.begin + i + 1, DType::kFloat32, &value);
      if (!std::isfinite(value)) continue;
      throw Error(weight.parts.front().tensor.file->path().string() + ": weight " +
                  text::in_quotes(weight.name) + ": element " + std::to_string(piece.begin + i) +
                  " is " + std::to_string(value) + ", fp16 ends at 65504");
    }
  }

  [[noreturn]] static void fail_nonfinite(const Weight& weight, std::uint64_t index) {
    float value = 0;
    read_elements(weight, index, index + 1, DType::kFloat32, &value);
    throw Error(weight.parts.front().tensor.file->path().string() + ": weight " +
                text::in_quotes(weight.name) + ": element " + std::to_string(index) + " is " +
                std::to_string(value) + ", wanted finite numbers");
  }

  ShardedWriter& writer_;
  const ConvertOptions& options_;
  std::vector<std::unique_ptr<Job>> jobs_;
  std::deque<LocatedTensor> copied_;  // what pieces of stacks point to
  std::vector<Piece> pieces_;
  std::atomic<std::size_t> next_ = 0;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;  // of the scales of all jobs
  std::condition_variable searched_;
};

}  // namespace

std::vector<TensorSpec> specs_of(const Conversion& conversion) {
  const Weight& weight = *conversion.weight;
  if (conversion.action == Action::kQuantize) return packed_specs(conversion);
  if (conversion.action == Action::kTurn) return turned_specs(conversion);
  if (conversion.action == Action::kCast) {
    return {{weight.name, stored(conversion.dtype), weight.shape}};
  }
  std::vector<TensorSpec> specs;
  if (weight.composed) {
    for (StackedPart& part : stacked_parts(conversion)) specs.push_back(std::move(part.spec));
    return specs;
  }
  for (const Part& part : weight.parts) {
    specs.push_back({part.tensor.entry->name, part.tensor.entry->dtype, part.tensor.entry->shape});
  }
  return specs;
}

std::uint64_t source_bytes(const Conversion& conversion) {
  const Weight& weight = *conversion.weight;
  if (conversion.action == Action::kCopy && weight.composed) {
    std::uint64_t bytes = 0;
    for (const StackedPart& part : stacked_parts(conversion)) {
      for (const LocatedTensor& source : part.sources) bytes += source.entry->size_bytes;
    }
    return bytes;
  }
  if (conversion.action == Action::kCopy) return weight.size_bytes;
  if (!weight.composed) return weight.parts.front().tensor.entry->size_bytes;
  std::uint64_t bytes = 0;
  for (const Weight& source : weight.composed->sources) {
    bytes += source.parts.front().tensor.entry->size_bytes;
  }
  return bytes;
}

void sort_by_source(std::vector<Conversion>& conversions) {
  const auto source = [](const Conversion& conversion) {
    const LocatedTensor& values = conversion.weight->parts.front().tensor;
    return std::pair(values.file, values.entry->offset_bytes);
  };
  std::sort(conversions.begin(), conversions.end(),
            [&](const Conversion& a, const Conversion& b) { return source(a) < source(b); });
}

void convert(std::span<const Conversion> conversions, ShardedWriter& writer,
             const ConvertOptions& options) {
  Converter(conversions, writer, options).run();
}

}  // namespace monograph
