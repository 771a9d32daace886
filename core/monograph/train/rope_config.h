// What a config says of rotary positions.
#pragma once

#include <optional>
#include <string>

#include "monograph/kernels/rotary/angles.h"
#include "monograph/train/config_keys.h"

namespace monograph::train {

// As transformers 5 writes it, `rope_parameters`, or as before: rope_theta and rope_scaling.
// `theta` is that of the class where the config may leave it out.
RopeScaling read_rope(ConfigKeys& keys, const std::string& source, std::optional<double> theta);

// Of layers that see all tokens and of those with a window, as Gemma 3 has them.
struct RopeOfLayers {
  RopeScaling full, sliding;
};
RopeOfLayers read_rope_of_layers(ConfigKeys& keys, const std::string& source);

}  // namespace monograph::train
