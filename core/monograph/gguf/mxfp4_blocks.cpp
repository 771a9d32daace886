#include "monograph/gguf/mxfp4_blocks.h"

#include <algorithm>

#include "monograph/gguf/blocks.h"
#include "monograph/weights/composed_weight.h"

namespace monograph::gguf {
namespace {

constexpr std::size_t kHalf = kBlock / 2;

std::uint8_t code(const std::uint8_t* values, std::size_t i) {
  return i % 2 == 0 ? values[i / 2] & 15 : values[i / 2] >> 4;
}

}  // namespace

bool has_mxfp4_blocks(const Weight& weight) {
  if (weight.composed != nullptr) {
    return !weight.composed->transposed && !weight.composed->alternate &&
           std::all_of(weight.composed->sources.begin(), weight.composed->sources.end(),
                       [](const Weight& source) {
                         return has_mxfp4_blocks(source) && source.elements % kBlock == 0;
                       });
  }
  if (!weight.view || weight.view->format != Format::kMxfp4) return false;
  const PackedView& view = *weight.view;
  return weight.columns.empty() && view.origin == 0 && view.cols % kBlock == 0 &&
         view.scales.kind == ScaleKind::kE8m0 && view.scales.tensor == nullptr;
}

void copy_mxfp4_blocks(const Weight& weight, std::uint64_t begin, std::uint64_t end,
                       std::uint8_t* out) {
  if (weight.composed != nullptr) {
    const std::uint64_t each = weight.composed->sources.front().elements;
    while (begin < end) {
      const std::uint64_t first = begin % each, count = std::min(each - first, end - begin);
      copy_mxfp4_blocks(weight.composed->sources[begin / each], first, first + count, out);
      begin += count;
      out += count / kBlock * (1 + kHalf);
    }
    return;
  }
  const PackedView& view = *weight.view;
  for (std::uint64_t block = begin / kBlock; block < end / kBlock; ++block, out += 1 + kHalf) {
    const std::uint8_t* values = view.values + block * kHalf;
    out[0] = view.scales.blocks[block];
    for (std::size_t i = 0; i < kHalf; ++i) {
      out[1 + i] = static_cast<std::uint8_t>(code(values, i) | code(values, i + kHalf) << 4);
    }
  }
}

}  // namespace monograph::gguf
