// The program: parses the command line, runs one subcommand, turns errors into text and exit codes.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>

#include "failure.h"
#include "program.h"
#include "program_name.h"

namespace {

using namespace monograph;
using namespace monograph::cli;

std::string no_such_command(const std::string& word) {
  std::string meant = nearest_command(word);
  std::error_code ignored;
  if (word.ends_with(".yml") || word.ends_with(".yaml")) {
    meant = "train " + word;
  } else if (meant.empty() && std::filesystem::exists(word, ignored)) {
    meant = "inspect " + word;
  }
  return "unknown command '" + word + "'" +
         (meant.empty() ? "; " : "; did you mean 'monograph " + meant + "'? ") +
         "monograph --help lists them";
}

int run(int argc, char** argv) {
  const std::span<char* const> arguments(argv + 1, argv + argc);
  for (const PythonCommand& row : python_commands()) {
    if (!arguments.empty() && std::strcmp(arguments[0], row.name) == 0)
      return exec_python(arguments);
  }
  if (merges_a_recipe(arguments) || generates_in_python(arguments)) return exec_python(arguments);
  if (arguments.empty()) {
    const std::string first = is_tool_alone() ? "" : "'monograph train RECIPE.yml' or ";
    return report(("a command is wanted, such as " + first +
                   "'monograph inspect MODEL'; monograph --help lists them")
                      .c_str(),
                  kUsage);
  }
  if (arguments[0][0] != '-' && summary_of(arguments[0]).empty()) {
    return report(no_such_command(arguments[0]).c_str(), kUsage);
  }
  Program program;
  const Parser::Outcome outcome = program.parser().parse(argc, argv);
  if (outcome != Parser::Outcome::kParsed) {
    return outcome == Parser::Outcome::kHelpPrinted ? kOk : kUsage;
  }
  catch_signals();
  return program.run();
}

}  // namespace

// Before tables of this program are made, which takes memory.
[[gnu::constructor(101)]] void begin() { end_quietly(); }

int main(int argc, char** argv) {
  take_program_name(argc > 0 ? argv[0] : nullptr);
  int code = kOk;
  try {
    code = run(argc, argv);
  } catch (...) {
    return report_failure();
  }
  // A result that did not reach its file is no result.
  if (std::fflush(stdout) != 0) return report(std::strerror(errno), kIo);
  return code;
}
