// The norms of a model over rows of activations, by the kernel of the Python operator.
#pragma once

#include <vector>

#include "monograph/train/activations.h"
#include "monograph/train/model_config.h"

namespace monograph::train {

// y = norm(x), or with a residual sum = round(x + residual) and y = norm(sum).
void normalise(const ModelConfig& config, const Activations& x, const Activations* residual,
               const std::vector<float>& gain, Activations* sum, Activations& y,
               const Workers& workers);

// The gradient of what was normalised, x or the sum, plus dsum unless it is nullptr.
void norm_gradient(const ModelConfig& config, const Activations& dy, const Activations* dsum,
                   const Activations& x, const std::vector<float>& gain, Activations& dx,
                   const Workers& workers);

}  // namespace monograph::train
