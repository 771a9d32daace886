// The vocabularies with units for products of matrices.
#pragma once

#include "targets.h"

namespace monograph {

using ProductTargets = MatrixTargets;

}  // namespace monograph
