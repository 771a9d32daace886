#include "monograph/documents/documents.h"

#include <string>

#include "monograph/base/error.h"

namespace monograph {

void check_offsets(const char* kernel, const char* name, const std::int32_t* offsets,
                   std::size_t count, std::size_t tokens) {
  const std::string which = std::string(kernel) + ": " + name;
  if (offsets[0] < 0) throw Error(which + "[0] is " + std::to_string(offsets[0]));
  for (std::size_t d = 0; d < count; ++d)
    if (offsets[d] > offsets[d + 1])
      throw Error(which + "[" + std::to_string(d + 1) + "] is " + std::to_string(offsets[d + 1]) +
                  ", below the one before it");
  if (static_cast<std::size_t>(offsets[count]) > tokens)
    throw Error(which + " ends at " + std::to_string(offsets[count]) + ", there are " +
                std::to_string(tokens) + " tokens");
}

}  // namespace monograph
