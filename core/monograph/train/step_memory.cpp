#include "monograph/train/step_memory.h"

#include <algorithm>
#include <bit>

namespace monograph::train {
namespace {

// u of the projections: of all layers, or of the largest, whose room serves the others.
std::size_t low_ranks(const BaseModel& base, const LoraParameters& parameters, bool recompute) {
  std::size_t sum = 0, largest = 0;
  for (const BaseLayer& layer : base.layers()) {
    std::size_t ranks = 0;
    for (const BaseProjection* const projection : projections_of(layer)) {
      const LoraPlace* const place = parameters.find(projection->module);
      if (place != nullptr) ranks += place->rank;
    }
    sum += ranks;
    largest = std::max(largest, ranks);
  }
  return recompute ? largest : sum;
}

std::uint64_t activation_bytes(const BaseModel& base, const LoraParameters& parameters,
                               const StepShape& shape) {
  const ModelConfig& c = base.config();
  const std::size_t width = c.width, inner = c.has_mlp() ? c.inner : 0, query = c.query_width(),
                    key = c.key_width();
  // LayerKept, LayerRoom and LanguageModel::Room.
  const std::size_t kept = (c.branch_norms ? 5 : 4) * width + 3 * query + 3 * key + 3 * inner +
                           c.experts.count + c.experts.slots;
  const std::size_t room =
      3 * inner + 3 * width + 2 * query + 2 * key + c.experts.count + c.experts.slots;
  const std::size_t stream = (c.layers + 1 + 3) * width;
  const std::size_t kept_layers = shape.recompute ? 1 : c.layers;
  std::size_t rank = 0, inputs = 0;
  for (const LoraPlace& place : parameters.places) {
    rank = std::max(rank, place.rank);
    inputs = std::max(inputs, place.inputs);
  }
  // Attention's turned gradients, or a projection's du and its dropped x, or of all slots what the
  // experts' first product gives and the gradient of what their second takes.
  const std::size_t passing = std::max(
      {query + key, rank + (shape.drops ? inputs : 0), c.experts.slots * 3 * c.experts.inner});
  const std::size_t elements =
      kept_layers * kept + low_ranks(base, parameters, shape.recompute) + room + stream + passing;
  // Log-sum-exps, numbers of experts (two of 4 bytes), and the loss.
  const std::size_t fp32 = kept_layers * (c.heads + 2 * c.experts.slots) + 2;
  const std::uint64_t angles = 2 * std::uint64_t{shape.length} * c.head_size * c.ropes.size();
  return std::uint64_t{shape.tokens} * (elements * size_bytes(base.dtype()) + 4 * fp32) +
         angles * size_bytes(base.dtype());
}

}  // namespace

StepMemory step_memory(const BaseModel& base, const LoraParameters& parameters,
                       const StepShape& shape) {
  const std::uint64_t size = parameters.values.size();
  // The sums on the way down the tree, the part that is made, and one that is added to a leaf's.
  const std::size_t leaves = std::max<std::size_t>(std::min(shape.leaves, shape.micro_batches), 1);
  const std::uint64_t alive =
      std::bit_width(leaves - 1) + 1 + (shape.micro_batches > leaves ? 1u : 0u);
  StepMemory memory;
  memory.base = base.nbytes();
  memory.adapter = size * (4 + size_bytes(base.dtype()));
  memory.moments = size * 8;
  memory.gradients = 4 * (size + 1) * alive;
  memory.activations = activation_bytes(base, parameters, shape);
  return memory;
}

}  // namespace monograph::train
