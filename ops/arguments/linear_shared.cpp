#include "arguments/linear_shared.h"

#include <algorithm>
#include <span>

namespace monograph::ops {
namespace {

// The layouts of all weights and their numbers of scales, read one after the other.
struct SharedLayouts {
  std::vector<Layout> layouts;
  std::vector<std::size_t> scales;
};

SharedLayouts read_layouts(const char* op, std::size_t weights, std::size_t scales,
                           const std::vector<std::int64_t>& numbers) {
  // Without a version the length alone says whether there is one for each weight.
  const bool versioned = std::any_of(numbers.begin(), numbers.end(), [](auto n) { return n < 0; });
  STD_TORCH_CHECK(weights != 0 && (versioned || numbers.size() == 5 * weights), op,
                  ": layouts has ", numbers.size(), " entries, wanted 5 for each of the ", weights,
                  " weights");
  SharedLayouts read;
  std::span<const std::int64_t> rest = numbers;
  std::size_t used = 0;
  for (std::size_t i = 0; i < weights; ++i) {
    read.layouts.push_back(take_layout(op, rest));
    STD_TORCH_CHECK(!rest.empty(), op, ": layouts ends before the number of scales of weight ", i);
    const std::int64_t count = rest.front();
    rest = rest.subspan(1);
    STD_TORCH_CHECK(count >= 0 && static_cast<std::size_t>(count) <= scales - used, op,
                    ": layouts claims ", count, " scales for weight ", i, ", ", scales - used,
                    " of ", scales, " are left");
    read.scales.push_back(static_cast<std::size_t>(count));
    used += read.scales.back();
  }
  STD_TORCH_CHECK(rest.empty(), op, ": layouts has ", rest.size(), " entries behind those of the ",
                  weights, " weights, wanted none");
  STD_TORCH_CHECK(used == scales, op, ": ", scales, " scales, layouts claims ", used);
  return read;
}

}  // namespace

std::vector<LinearWeight> check_weights(const char* op, const std::vector<Tensor>& values,
                                        const std::vector<Tensor>& scales,
                                        const std::vector<std::int64_t>& layouts) {
  const SharedLayouts read = read_layouts(op, values.size(), scales.size(), layouts);
  std::vector<LinearWeight> weights;
  weights.reserve(values.size());
  auto first = scales.begin();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto last = first + static_cast<std::ptrdiff_t>(read.scales[i]);
    weights.push_back(check_weight(op, values[i], {first, last}, read.layouts[i]));
    first = last;
  }
  return weights;
}

void check_count(const char* op, const char* what, const std::vector<Tensor>& list, std::size_t n) {
  STD_TORCH_CHECK(list.empty() || list.size() == n, op, ": ", what, " has ", list.size(),
                  " entries, wanted 0 or ", n);
}

void check_together(const char* op, const char* first, const std::vector<Tensor>& one,
                    const char* second, const std::vector<Tensor>& other) {
  STD_TORCH_CHECK(one.size() == other.size(), op, ": ", first, " has ", one.size(), " entries, ",
                  second, " has ", other.size(), "; they must come together");
}

}  // namespace monograph::ops
