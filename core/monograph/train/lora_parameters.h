// The trained numbers of a run: LoRA factors of all projections behind each other in one fp32
// vector, in the order of the model's modules, A before B; their moments beside them. This is all
// that training changes, and the layout is that of Python's FlatParameters.
#pragma once

#include <filesystem>
#include <vector>

#include "monograph/adapter/adapter.h"
#include "monograph/train/base_model.h"
#include "monograph/train/projection.h"

namespace monograph::train {

struct LoraParameters {
  std::vector<LoraPlace> places;
  std::vector<float> values, exp_avg, exp_avg_sq;
  float steps = 0;  // updates made

  // The place of a module, or nullptr if it has no LoRA.
  const LoraPlace* find(std::string_view module) const;
};

// The projections of a layer in the order of the parameters; experts are none.
std::vector<const BaseProjection*> projections_of(const BaseLayer& layer);

// Throws Error if a projection would be computed by another program's kernels in the Python step,
// whose bits this one could not have: a plain one without LoRA, or in float32.
void check_base_of(const LoraParameters& parameters, const BaseModel& base);

// The factors of an adapter of PEFT, moments of 0. Throws Error for what is no LoRA of a
// projection.
LoraParameters read_parameters(const Adapter& adapter, const BaseModel& base);

}  // namespace monograph::train
