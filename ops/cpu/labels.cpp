#include "cpu/labels.h"

namespace monograph::ops {
namespace {

void check_labels(const char* op, const std::int64_t* labels, std::size_t count,
                  std::size_t vocabulary) {
  for (std::size_t t = 0; t < count; ++t)
    STD_TORCH_CHECK(labels[t] == kIgnoredLabel ||
                        (labels[t] >= 0 && static_cast<std::size_t>(labels[t]) < vocabulary),
                    op, ": label ", labels[t], " of token ", t, " is not in the vocabulary of ",
                    vocabulary, "; wanted 0 to ", static_cast<std::int64_t>(vocabulary) - 1,
                    ", or ", kIgnoredLabel, " for none");
}

}  // namespace

HeadArguments check_head_and_labels(const char* op, const Tensor& x, const Tensor& values,
                                    const std::vector<Tensor>& scales,
                                    const std::vector<std::int64_t>& layout,
                                    const std::optional<Tensor>& bias, const Tensor& labels,
                                    double softcap, double scale) {
  HeadArguments a = check_head(op, x, values, scales, layout, bias, labels, softcap, scale);
  check_labels(op, a.problem.labels, a.x.matrix.rows, a.problem.weight.packed.rows);
  return a;
}

}  // namespace monograph::ops
