#include "monograph/hash/sha256_blocks.h"

namespace monograph {

Sha256Blocks* sha256_blocks() { return sha256_blocks_scalar; }

}  // namespace monograph
