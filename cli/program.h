// The tree of subcommands and options, built from the tables of program.cpp. Help, completion and
// man page are made by walking it.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "command.h"

namespace monograph::cli {

// Done by Python: `monograph train ...` becomes `python3 -m monograph train ...`.
struct PythonCommand {
  const char* name;
  const char* summary;
};

std::span<const Command* const> commands();
std::span<const PythonCommand> python_commands();
// Of any command; empty if there is none of this name.
std::string_view summary_of(std::string_view command);

class Program {
 public:
  Program();

  Parser& parser() { return parser_; }
  Session& session() { return session_; }
  // The subcommand that was parsed.
  int run();

 private:
  struct Entry {
    CommandLine line;
    Run run;
  };
  void add(CommandLine& parent, const Command& command);

  Parser parser_;
  Session session_;
  std::vector<Entry> entries_;
};

// The command that somebody who typed `word` meant; empty if none is near.
std::string nearest_command(std::string_view word);

// The exit codes as a table for the end of a help page.
std::string exit_code_text();

// Whether Python does this call of merge: its first argument is a recipe, or a folder that holds
// one while no adapter is named. The same rule as in python/monograph/cli/merge.py.
bool merges_a_recipe(std::span<char* const> arguments);

// Whether Python does this call of generate: --native is not among its arguments, and there is a
// package beside this program. The same rule as in python/monograph/cli/generate.py.
bool generates_in_python(std::span<char* const> arguments);

// Replaces the program by Python's; returns an exit code only if that is impossible. `arguments`
// begin with the name of the subcommand.
int exec_python(std::span<char* const> arguments);

}  // namespace monograph::cli
