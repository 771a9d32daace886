// What core throws when data from outside is wrong, and the check for our own mistakes.
#pragma once

#include <cassert>
#include <stdexcept>
#include <string>

namespace monograph {

// A message names the thing, the value found and the value wanted. Core never prints or exits; the
// operator layer and the command line turn an Error into their own kind of report.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace monograph

// Our own mistake: never reachable by user input, gone in release builds.
#define MONOGRAPH_ASSERT(condition) assert(condition)
