#include "routed_experts.h"

#include <algorithm>

#include "monograph/read_ahead/registry.h"

namespace monograph::ops {
namespace {

constexpr std::size_t kNeed = 6;

// Of each stack the slices of the experts that are routed to.
void note_experts(const ExpertsWeight& weight, const std::vector<std::size_t>& used,
                  std::size_t experts) {
  const auto note = [&](const Tensor& tensor) {
    const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    const auto bytes = static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
    if (bytes % experts != 0) return note_use(begin);
    for (const std::size_t expert : used) note_use(begin + expert * (bytes / experts));
  };
  note(weight.values);
  for (const Tensor& scale : weight.scales) note(scale);
}

}  // namespace

void check_experts_devices(const char* op, const ExpertsWeight& first, const ExpertsWeight& second,
                           std::initializer_list<NamedTensors> rows) {
  check_device(op, DeviceType::CPU, rows);
  check_device(op, DeviceType::CPU,
               {{"values1", first.values},
                {"scales1", first.scales},
                {"bias1", first.bias},
                {"values2", second.values},
                {"scales2", second.scales},
                {"bias2", second.bias},
                {"a1", first.a},
                {"b1", first.b},
                {"a2", second.a},
                {"b2", second.b}});
}

void note_routed(const ExpertsWeight& first, const ExpertsWeight& second,
                 const ExpertsProblem& problem) {
  if (!reads_ahead() || problem.experts == 0) return;
  std::vector<std::size_t> used(problem.ids, problem.ids + problem.all_slots());
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  // Ids outside are slots that nobody computes; negative ones have become large.
  used.erase(std::lower_bound(used.begin(), used.end(), problem.experts), used.end());
  note_experts(first, used, problem.experts);
  note_experts(second, used, problem.experts);
}

ExpertsGradientTensors make_gradients(const char* op, const Tensor& x, std::int64_t dx_rows,
                                      const Tensor& weights, const ExpertsWeight& first,
                                      const ExpertsWeight& second, const std::vector<bool>& need) {
  STD_TORCH_CHECK(need.size() == kNeed, op, ": need has ", need.size(), " entries, wanted ", kNeed);
  ExpertsGradientTensors made;
  const auto wanted = [&](bool needed, const Tensor& like, std::vector<std::int64_t> shape,
                          Tensor& tensor, void*& view) {
    if (!needed) {
      tensor = empty(op, x, {0}, x.scalar_type());
      return;
    }
    tensor = empty(op, like, shape, like.scalar_type());
    if (tensor.numel() != 0) view = tensor.mutable_data_ptr();
  };
  const auto shape = [](const Tensor& like) {
    return std::vector<std::int64_t>(like.sizes().begin(), like.sizes().end());
  };
  const auto part = [&](bool needed, const std::optional<Tensor>& like, Tensor& tensor,
                        void*& view) {
    wanted(needed && like.has_value(), like ? *like : x, like ? shape(*like) : shape(x), tensor,
           view);
  };
  wanted(need[0], x, {dx_rows, x.size(1)}, made.dx, made.views.dx);
  wanted(need[1], weights, shape(weights), made.dweights, made.views.dweights);
  part(need[2], first.bias, made.dbias1, made.views.dbias1);
  part(need[3], second.bias, made.dbias2, made.views.dbias2);
  part(need[4], first.a, made.da1, made.views.da1);
  part(need[4], first.b, made.db1, made.views.db1);
  part(need[5], second.a, made.da2, made.views.da2);
  part(need[5], second.b, made.db2, made.views.db2);
  return made;
}

}  // namespace monograph::ops
