// The command line is wrong in a way that only its command can see.
#pragma once

#include <stdexcept>
#include <string>

namespace monograph::cli {

// Ends the program with kUsage.
class UsageError : public std::runtime_error {
 public:
  explicit UsageError(const std::string& what) : std::runtime_error(what) {}
  UsageError(const std::string& option, const std::string& what)
      : std::runtime_error(option + ": " + what) {}
};

}  // namespace monograph::cli
