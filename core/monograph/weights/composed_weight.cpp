#include "monograph/weights/composed_weight.h"

#include <algorithm>
#include <cstring>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"

namespace monograph {
namespace {

// Rows that are gathered together: a line of the cache is filled before it is left.
constexpr std::uint64_t kRowsAtOnce = 64;

// Parts, sizes and formats of the sources under another name and shape.
Weight seen_as(std::string name, std::vector<std::uint64_t> shape, ComposedWeight composed) {
  const Weight& first = composed.sources.front();
  Weight weight;
  weight.name = std::move(name);
  weight.format = first.format;
  weight.quant_method = first.quant_method;
  weight.block = first.block;
  weight.double_quant = first.double_quant;
  weight.dtype = first.dtype;
  weight.shape = std::move(shape);
  for (const Weight& source : composed.sources) {
    weight.elements += source.elements;
    weight.size_bytes += source.size_bytes;
    weight.parts.insert(weight.parts.end(), source.parts.begin(), source.parts.end());
  }
  weight.composed = std::make_shared<const ComposedWeight>(std::move(composed));
  return weight;
}

// Elements of [rows, cols] matrices that are stored as [cols, rows].
class Transposer {
 public:
  Transposer(const Weight& weight, DType dtype)
      : source_(weight.composed->sources.front()),
        rows_(weight.shape[weight.shape.size() - 2]),
        cols_(weight.shape.back()),
        dtype_(dtype) {}

  void read(std::uint64_t begin, std::uint64_t end, std::byte* out) {
    while (begin < end) {
      const std::uint64_t row = begin / cols_, col = begin % cols_;
      std::uint64_t count = std::min(cols_ - col, end - begin);
      if (count < cols_) {
        part_of_row(row, col, count, out);
      } else {
        // Whole rows of one matrix.
        const std::uint64_t left = std::min((end - begin) / cols_, rows_ - row % rows_);
        const std::uint64_t rows = std::min(left, kRowsAtOnce);
        whole_rows(row, rows, out);
        count = rows * cols_;
      }
      begin += count;
      out += count * size_bytes(dtype_);
    }
  }

 private:
  // Where the source has column `col` of row `row`.
  std::uint64_t at(std::uint64_t row, std::uint64_t col) const {
    return (row / rows_ * cols_ + col) * rows_ + row % rows_;
  }
  void part_of_row(std::uint64_t row, std::uint64_t col, std::uint64_t count, std::byte* out) {
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t element = at(row, col + i);
      read_elements(source_, element, element + 1, dtype_, out + i * size_bytes(dtype_));
    }
  }
  void whole_rows(std::uint64_t row, std::uint64_t rows, std::byte* out) {
    with_type(dtype_, [&]<class T>() {
      run_.resize(rows * sizeof(T));
      for (std::uint64_t col = 0; col < cols_; ++col) {
        const std::uint64_t from = at(row, col);
        read_elements(source_, from, from + rows, dtype_, run_.data());
        for (std::uint64_t i = 0; i < rows; ++i) {
          std::memcpy(out + (i * cols_ + col) * sizeof(T), run_.data() + i * sizeof(T), sizeof(T));
        }
      }
    });
  }

  const Weight& source_;
  std::uint64_t rows_, cols_;
  DType dtype_;
  std::vector<std::byte> run_;
};

void read_in_turns(const Weight& weight, std::uint64_t begin, std::uint64_t end, DType dtype,
                   std::byte* to) {
  const std::vector<Weight>& sources = weight.composed->sources;
  const std::uint64_t cols = weight.shape.back(), pair = 2 * sources.front().elements;
  while (begin < end) {
    const std::uint64_t row = begin % pair / cols, col = begin % cols;
    const std::uint64_t count = std::min(cols - col, end - begin);
    const std::uint64_t first = row / 2 * cols + col;
    read_elements(sources[begin / pair * 2 + row % 2], first, first + count, dtype, to);
    begin += count;
    to += count * size_bytes(dtype);
  }
}

std::span<const std::uint8_t> share(std::span<const std::uint8_t> bytes, std::uint64_t elements,
                                    std::uint64_t begin, std::uint64_t end) {
  const auto at = [&](std::uint64_t element) {
    return static_cast<std::size_t>(static_cast<double>(bytes.size()) *
                                    (static_cast<double>(element) / static_cast<double>(elements)));
  };
  const std::size_t first = at(begin), last = std::min(at(end), bytes.size());
  return bytes.subspan(first, last - first);
}

}  // namespace

bool ComposedWeight::is_readable() const {
  return std::all_of(sources.begin(), sources.end(),
                     [](const Weight& source) { return source.is_readable(); });
}

std::vector<std::span<const std::uint8_t>> ComposedWeight::bytes(std::uint64_t begin,
                                                                 std::uint64_t end) const {
  std::vector<std::span<const std::uint8_t>> spans;
  const std::uint64_t each = sources.front().elements;
  if (each == 0 || begin == end) return spans;
  if (alternate) {
    begin = begin / (2 * each) * (2 * each);
    end = (end + 2 * each - 1) / (2 * each) * (2 * each);
  } else if (transposed) {
    const std::vector<std::uint64_t>& shape = sources.front().shape;
    const std::uint64_t matrix = shape[shape.size() - 2] * shape.back();
    begin = begin / matrix * matrix;
    end = (end + matrix - 1) / matrix * matrix;
  }
  for (std::uint64_t i = begin / each; i * each < end; ++i) {
    const std::uint64_t first = std::max(begin, i * each) - i * each;
    const std::uint64_t last = std::min(end, (i + 1) * each) - i * each;
    spans.push_back(share(sources[i].parts.front().tensor.bytes(), each, first, last));
  }
  return spans;
}

Weight stacked(std::string name, std::vector<std::uint64_t> shape, std::vector<Weight> sources) {
  MONOGRAPH_ASSERT(!sources.empty());
  return seen_as(std::move(name), std::move(shape), {std::move(sources), false, false});
}

Weight stacked_in_turns(std::string name, std::vector<std::uint64_t> shape,
                        std::vector<Weight> sources) {
  MONOGRAPH_ASSERT(!sources.empty() && sources.size() % 2 == 0);
  return seen_as(std::move(name), std::move(shape), {std::move(sources), false, true});
}

Weight transposed(const Weight& weight) {
  MONOGRAPH_ASSERT(weight.shape.size() >= 2);
  std::vector<std::uint64_t> shape = weight.shape;
  std::swap(shape[shape.size() - 2], shape.back());
  return seen_as(weight.name, std::move(shape), {{weight}, true, false});
}

void read_composed(const Weight& weight, std::uint64_t begin, std::uint64_t end, DType dtype,
                   void* out) {
  auto* to = static_cast<std::byte*>(out);
  if (weight.composed->transposed) return Transposer(weight, dtype).read(begin, end, to);
  if (weight.composed->alternate) return read_in_turns(weight, begin, end, dtype, to);
  const std::uint64_t each = weight.composed->sources.front().elements;
  while (begin < end) {
    const std::uint64_t first = begin % each, count = std::min(each - first, end - begin);
    read_elements(weight.composed->sources[begin / each], first, first + count, dtype, to);
    begin += count;
    to += count * size_bytes(dtype);
  }
}

}  // namespace monograph
