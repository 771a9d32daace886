// `monograph train ...` is `python3 -m monograph train ...`, as `git foo` is `git-foo`.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "failure.h"
#include "program.h"
#include "program_name.h"

namespace monograph::cli {
namespace {

// $MONOGRAPH_PYTHON; else the python3 next to this program, which is that of the virtual
// environment the wheel was installed in; else the first one on the PATH.
std::string find_python() {
  if (const char* chosen = std::getenv("MONOGRAPH_PYTHON"); chosen != nullptr && *chosen != 0) {
    return chosen;
  }
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    const auto sibling = self.parent_path() / "python3";
    if (::access(sibling.c_str(), X_OK) == 0) return sibling.string();
  }
  return "python3";
}

}  // namespace

bool merges_a_recipe(std::span<char* const> arguments) {
  if (arguments.size() < 2 || std::strcmp(arguments[0], "merge") != 0) return false;
  const std::string_view first = arguments[1];
  if (first.ends_with(".yml") || first.ends_with(".yaml")) return true;
  const bool named = std::any_of(arguments.begin(), arguments.end(), [](std::string_view word) {
    return word == "--adapter" || word.starts_with("--adapter=");
  });
  std::error_code ignored;
  return !named &&
         std::filesystem::is_regular_file(std::filesystem::path(first) / "recipe.yml", ignored);
}

bool generates_in_python(std::span<char* const> arguments) {
  if (is_tool_alone() || arguments.empty() || std::strcmp(arguments[0], "generate") != 0)
    return false;
  return std::none_of(arguments.begin(), arguments.end(),
                      [](std::string_view word) { return word == "--native"; });
}

int exec_python(std::span<char* const> arguments) {
  if (is_tool_alone()) {
    const std::string name = arguments[0];
    return report(("'" + name + (name == "merge" ? "' by a recipe" : "'") +
                   " is done by the Python package: pip install monograph, then python -m "
                   "monograph " +
                   name)
                      .c_str(),
                  kIo);
  }
  std::string python = find_python(), flag = "-m", module = "monograph";
  std::vector<char*> command = {python.data(), flag.data(), module.data()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  command.push_back(nullptr);
  ::execvp(command[0], command.data());
  const std::string why = std::strerror(errno);
  return report(("'" + std::string(arguments[0]) + "' is done by the Python package, and '" +
                 python + "' cannot be run: " + why +
                 ". Install Python 3.10 or later with the package monograph, or set "
                 "MONOGRAPH_PYTHON.")
                    .c_str(),
                kIo);
}

}  // namespace monograph::cli
