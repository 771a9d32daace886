#include "monograph/train/tree_sum.h"

#include <optional>
#include <utility>

namespace monograph::train {
namespace {

constexpr std::size_t kGrain = 1 << 16;

class Tree {
 public:
  using Sum = std::vector<float>;

  Tree(std::size_t micro_batches, std::size_t leaves, const std::function<Sum(std::size_t)>& part,
       const Workers& workers)
      : micro_batches_(micro_batches), leaves_(leaves), part_(part), workers_(workers) {}

  // Of the leaves [begin, end); of none nothing is added.
  std::optional<Sum> sum(std::size_t begin, std::size_t end) const {
    const std::size_t first = place(begin), last = place(end);
    if (first == last) return std::nullopt;
    if (end - begin == 1) return leaf(first, last);
    const std::size_t middle = begin + (end - begin) / 2;
    std::optional<Sum> left = sum(begin, middle), right = sum(middle, end);
    if (!left) return right;
    if (right) add_to(*left, *right);
    return left;
  }

 private:
  std::size_t place(std::size_t leaf) const { return leaf * micro_batches_ / leaves_; }

  Sum leaf(std::size_t first, std::size_t last) const {
    Sum sum = part_(first);
    for (std::size_t i = first + 1; i < last; ++i) add_to(sum, part_(i));
    return sum;
  }

  void add_to(Sum& sum, const Sum& other) const {
    workers_.parallel_for(sum.size(), kGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) sum[i] += other[i];
    });
  }

  std::size_t micro_batches_, leaves_;
  const std::function<Sum(std::size_t)>& part_;
  const Workers& workers_;
};

}  // namespace

std::vector<float> tree_sum(std::size_t micro_batches, std::size_t leaves,
                            const std::function<std::vector<float>(std::size_t)>& part,
                            const Workers& workers) {
  std::optional<std::vector<float>> sum = Tree(micro_batches, leaves, part, workers).sum(0, leaves);
  return sum ? std::move(*sum) : std::vector<float>();
}

}  // namespace monograph::train
