// The variant list and the parallel drivers; no intrinsics here.
#include "monograph/kernels/adamw/adamw.h"

#include <algorithm>
#include <cmath>

#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
const AdamwKernels* adamw_variant(DType dtype);

const std::vector<Variant<const AdamwKernels, ByDType>>& adamw_variants() {
  static const auto rows = make_variants<const AdamwKernels>(
      VectorTargets{}, every_dtype(),
      []<class V>(ByDType key) { return adamw_variant<V>(key.dtype); });
  return rows;
}

namespace {

// body(tensor, begin, end) for blocks of the tensors, in parallel; the place of a block among all.
template <class Body>
void for_blocks(std::span<const AdamwTensor> tensors, ParallelFor parallel_for, Body body) {
  std::vector<std::size_t> first = {0};
  for (const AdamwTensor& tensor : tensors)
    first.push_back(first.back() + (tensor.size + kNormBlock - 1) / kNormBlock);
  parallel_for(first.back(), 2, [&](std::size_t begin, std::size_t end) {
    std::size_t t = static_cast<std::size_t>(std::upper_bound(first.begin(), first.end(), begin) -
                                             first.begin() - 1);
    for (std::size_t block = begin; block < end; ++block) {
      while (block >= first[t + 1]) ++t;
      const std::size_t from = (block - first[t]) * kNormBlock;
      body(t, block, from, std::min(from + kNormBlock, tensors[t].size));
    }
  });
}

std::size_t count_blocks(std::span<const AdamwTensor> tensors) {
  std::size_t count = 0;
  for (const AdamwTensor& tensor : tensors) count += (tensor.size + kNormBlock - 1) / kNormBlock;
  return count;
}

}  // namespace

AdamwNumbers adamw_numbers(const AdamwTensor& tensor, const AdamwSettings& s) {
  const double first = 1 - std::pow(s.beta1, tensor.step);
  const double second = 1 - std::pow(s.beta2, tensor.step);
  return {s.clip,
          static_cast<float>(s.beta2),
          static_cast<float>(1 - s.beta1),
          static_cast<float>(1 - s.beta2),
          static_cast<float>(s.rate * tensor.weight_decay),
          static_cast<float>(s.rate / first),
          static_cast<float>(1 / std::sqrt(second)),
          static_cast<float>(s.eps)};
}

double gradient_norm(std::span<const AdamwTensor> tensors, ParallelFor parallel_for) {
  std::vector<double> sums(count_blocks(tensors));
  for_blocks(tensors, parallel_for,
             [&](std::size_t t, std::size_t block, std::size_t begin, std::size_t end) {
               const AdamwTensor& tensor = tensors[t];
               const auto* const bytes = static_cast<const std::byte*>(tensor.gradient);
               sums[block] =
                   pick(adamw_variants(), tensor.gradient_dtype)
                       ->squares(bytes + begin * size_bytes(tensor.gradient_dtype), end - begin);
             });
  double sum = 0;
  for (const double block : sums) sum += block;
  return std::sqrt(sum);
}

void adamw(std::span<const AdamwTensor> tensors, const AdamwSettings& settings,
           ParallelFor parallel_for) {
  std::vector<AdamwNumbers> numbers;
  for (const AdamwTensor& tensor : tensors) numbers.push_back(adamw_numbers(tensor, settings));
  for_blocks(tensors, parallel_for,
             [&](std::size_t t, std::size_t, std::size_t begin, std::size_t end) {
               pick(adamw_variants(), tensors[t].gradient_dtype)
                   ->update(tensors[t], numbers[t], begin, end);
             });
}

}  // namespace monograph
