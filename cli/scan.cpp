#include "scan.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "monograph/base/float_types.h"
#include "monograph/cpu/parallel.h"
#include "monograph/formats/all.h"
#include "monograph/formats/runs.h"

namespace monograph::cli {
namespace {

using safetensors::StoredDType;
using safetensors::TensorEntry;

constexpr std::uint64_t kStep = 1 << 22;  // bytes

// How to see NaN and infinity in the bits of a type: all exponent bits set; some or no other bits.
struct FloatBits {
  std::uint64_t exponent = 0, rest = 0;  // masks; 0: not a float with infinities
};

FloatBits float_bits(StoredDType dtype) {
  switch (dtype) {
    case StoredDType::kF16:
      return {0x7c00, 0x3ff};
    case StoredDType::kBF16:
      return {0x7f80, 0x7f};
    case StoredDType::kF32:
      return {0x7f800000, 0x7fffff};
    case StoredDType::kF64:
      return {0x7ff0000000000000, 0xfffffffffffff};
    case StoredDType::kF8E5M2:
      return {0x7c, 0x3};
    default:
      return {};
  }
}

struct Counts {
  std::uint64_t nans = 0, infinities = 0, first_nan = UINT64_MAX, first_infinity = UINT64_MAX;

  void note(std::uint64_t index, bool nan) {
    ++(nan ? nans : infinities);
    std::uint64_t& first = nan ? first_nan : first_infinity;
    first = std::min(first, index);
  }
};

template <class T>
void count_floats(const std::uint8_t* bytes, std::uint64_t begin, std::uint64_t end, FloatBits bits,
                  Counts& counts) {
  const auto exponent = static_cast<T>(bits.exponent), rest = static_cast<T>(bits.rest);
  for (std::uint64_t i = begin; i < end; ++i) {
    T value;
    std::memcpy(&value, bytes + i * sizeof(T), sizeof(T));
    if ((value & exponent) == exponent) counts.note(i, (value & rest) != 0);
  }
}

void count_bytes(const std::uint8_t* bytes, std::uint64_t begin, std::uint64_t end,
                 std::uint8_t mask, std::uint8_t nan, Counts& counts) {
  for (std::uint64_t i = begin; i < end; ++i) {
    if ((bytes[i] & mask) == nan) counts.note(i, /*nan=*/true);
  }
}

// Elements [begin, end) of a tensor.
Counts count(const safetensors::LocatedTensor& tensor, std::string_view role, std::uint64_t begin,
             std::uint64_t end) {
  Counts counts;
  const std::uint8_t* bytes = tensor.bytes().data();
  const StoredDType dtype = tensor.entry->dtype;
  const FloatBits bits = float_bits(dtype);
  if (dtype == StoredDType::kF8E4M3) {
    count_bytes(bytes, begin, end, 0x7f, 0x7f, counts);
  } else if (dtype == StoredDType::kF8E8M0 || (dtype == StoredDType::kU8 && role == "scale")) {
    count_bytes(bytes, begin, end, 0xff, 0xff, counts);
  } else if (bits.exponent == 0) {
    return counts;
  } else if (bits_of(dtype) == 8) {
    count_floats<std::uint8_t>(bytes, begin, end, bits, counts);
  } else if (bits_of(dtype) == 16) {
    count_floats<std::uint16_t>(bytes, begin, end, bits, counts);
  } else if (bits_of(dtype) == 32) {
    count_floats<std::uint32_t>(bytes, begin, end, bits, counts);
  } else {
    count_floats<std::uint64_t>(bytes, begin, end, bits, counts);
  }
  return counts;
}

// Codes of a 4-bit format that stand for zero.
bool is_zero_code(Format format, unsigned code) {
  return (format == Format::kFp4 ? Fp4::kValues : Nf4::kValues)[code] == 0.0f;
}

// Blocks whose scale is zero although a code is not: the weights were lost.
Finding zero_scales(const Weight& weight) {
  Finding finding = {weight.name, "absmax", "zero scale", 0, 0};
  const PackedView& view = *weight.view;
  const std::uint64_t blocks = ceil_div(weight.elements, view.block);
  for (std::uint64_t block = 0; block < blocks; ++block) {
    if (absmax_scale(view.scales, block) != 0.0f) continue;
    const std::uint64_t end = std::min((block + 1) * view.block, weight.elements);
    for (std::uint64_t i = block * view.block; i < end; ++i) {
      const unsigned byte = view.values[i / 2], code = i % 2 == 0 ? byte >> 4 : byte & 15;
      if (is_zero_code(view.format, code)) continue;
      if (finding.count++ == 0) finding.first = block;
      break;
    }
  }
  return finding;
}

bool is_zero_element(const PackedView& view, std::uint64_t i) {
  const bool bytes = find_format(view.format)->bits == 8;
  if (bytes) return (view.values[i] & 0x7f) == 0;
  return ((i % 2 == 0 ? view.values[i / 2] : view.values[i / 2] >> 4) & 7) == 0;
}

// The same for formats of small floats, told by values that are zero although their codes are not.
Finding zero_scales_of_floats(const Weight& weight) {
  Finding finding = {weight.name, "scale", "zero scale", 0, 0};
  const PackedView& view = *weight.view;
  const bool square = find_format(view.format)->shape == BlockShape::kSquare;
  std::vector<float> row(view.cols);
  std::set<std::uint64_t> counted;
  for (std::uint64_t r = 0; r < view.rows; ++r) {
    const std::uint64_t first = r * view.cols;
    read_elements(weight, first, first + view.cols, DType::kFloat32, row.data());
    for (std::uint64_t c = 0; c < view.cols; ++c) {
      if (row[c] != 0.0f || is_zero_element(view, first + c)) continue;
      counted.insert(square ? square_block(view, r, c) : (first + c) / view.block);
    }
  }
  finding.count = counted.size();
  finding.first = counted.empty() ? 0 : *counted.begin();
  return finding;
}

// The same for groups of a row: with scales of 1 what was lost is not zero.
Finding zero_scales_of_groups(const Weight& weight) {
  Finding finding = {weight.name, "scale", "zero scale", 0, 0};
  const PackedView& view = *weight.view;
  const float one = 1.0f;
  Weight codes = weight;
  codes.columns.clear();  // as they are stored: groups are neighbours there
  codes.view->scales.blocks = reinterpret_cast<const std::uint8_t*>(&one);
  codes.view->scales.kind = ScaleKind::kFp32;
  codes.view->scales.one = true;
  std::vector<float> group(view.block);
  const std::uint64_t groups = view.scales.one || view.cols == 0
                                   ? std::min<std::uint64_t>(view.rows, 1)
                                   : view.elements() / view.block;
  for (std::uint64_t i = 0; i < groups; ++i) {
    if (group_scale(view.scales, i) != 0.0f) continue;
    const std::uint64_t first = i * view.block;
    read_elements(codes, first, first + view.block, DType::kFloat32, group.data());
    const bool lost = std::any_of(group.begin(), group.end(), [](float x) { return x != 0.0f; });
    if (lost && finding.count++ == 0) finding.first = i;
  }
  return finding;
}

class Scanner {
 public:
  Scanner(const std::vector<Weight>& weights, const std::function<void(std::uint64_t)>& advance)
      : advance_(advance) {
    for (const Weight& weight : weights) {
      const bool flat = weight.view && (weight.format == "nf4" || weight.format == "fp4");
      if (weight.view) pieces_.push_back({&weight, nullptr, 0, 0});
      for (const Part& part : weight.parts) {
        // Packed 4-bit values are bytes of any storage type: no number there is wrong.
        if (flat && part.role == "values") {
          pieces_.push_back({&weight, &part, 0, 0});
          continue;
        }
        const std::uint64_t elements = part.tensor.entry->elements;
        for (std::uint64_t begin = 0; begin < elements; begin += kStep) {
          pieces_.push_back({&weight, &part, begin, std::min(begin + kStep, elements)});
        }
      }
    }
  }

  std::vector<Finding> run(int threads) {
    ThreadPool pool(threads);
    pool.parallel_for(static_cast<std::size_t>(threads), 1, [this](std::size_t, std::size_t) {
      for (std::size_t i = next_++; i < pieces_.size(); i = next_++) look_at(pieces_[i]);
    });
    std::vector<Finding> findings;
    for (auto& [key, finding] : findings_) findings.push_back(finding);
    return findings;
  }

 private:
  struct Piece {
    const Weight* weight;
    const Part* part;  // nullptr: the scales against the codes
    std::uint64_t begin, end;
  };

  void look_at(const Piece& piece) {
    if (piece.part == nullptr) {
      const Format format = piece.weight->view->format;
      const bool absmax = format == Format::kNf4 || format == Format::kFp4;
      const bool groups = find_format(format)->shape == BlockShape::kGroup;
      const Finding finding = absmax   ? zero_scales(*piece.weight)
                              : groups ? zero_scales_of_groups(*piece.weight)
                                       : zero_scales_of_floats(*piece.weight);
      if (finding.count != 0) add(finding);
      return;
    }
    const TensorEntry& entry = *piece.part->tensor.entry;
    const Counts counts = count(piece.part->tensor, piece.part->role, piece.begin, piece.end);
    const auto note = [&](std::string_view what, std::uint64_t number, std::uint64_t first) {
      if (number != 0) add({piece.weight->name, piece.part->role, what, number, first});
    };
    note("NaN", counts.nans, counts.first_nan);
    note("infinity", counts.infinities, counts.first_infinity);
    advance_(piece.end == 0 ? entry.size_bytes
                            : (piece.end - piece.begin) * bits_of(entry.dtype) / 8);
  }

  void add(const Finding& finding) {
    const std::lock_guard lock(mutex_);
    const auto [entry, is_new] =
        findings_.try_emplace({finding.weight, finding.part, finding.what}, finding);
    if (is_new) return;
    entry->second.count += finding.count;
    entry->second.first = std::min(entry->second.first, finding.first);
  }

  const std::function<void(std::uint64_t)>& advance_;
  std::vector<Piece> pieces_;
  std::atomic<std::size_t> next_ = 0;
  std::mutex mutex_;
  std::map<std::tuple<std::string, std::string_view, std::string_view>, Finding> findings_;
};

}  // namespace

std::vector<Finding> scan(const std::vector<Weight>& weights, int threads,
                          const std::function<void(std::uint64_t)>& advance) {
  return Scanner(weights, advance).run(threads);
}

}  // namespace monograph::cli
