#include "program.h"

#include <array>

#include "monograph/version.h"
#include "nearest.h"
#include "program_name.h"

namespace monograph::cli {
namespace {

constexpr std::array kCommands = {
    &kInspect,     // what is there
    &kQuantize,    // another folder from it
    &kDequantize,  //
    &kConvert,     //
    &kMerge,       //
    &kExport,      // one file for other programs
    &kFinetune,    // an adapter from a base and tokens
    &kGenerate,    // what it answers
    &kAdapter,     // an adapter beside its base
    &kVerify,      // is it right
    &kDiff,        //
    &kCompletion,  // about the program
    &kMan,         //
};

constexpr std::array kPythonCommand = {
    PythonCommand{"example", "a small model, data and a recipe to try, offline (Python)"},
    PythonCommand{"preprocess", "tokenise and pack a dataset (Python)"},
    PythonCommand{"train", "fine-tune from a YAML file (Python)"},
    PythonCommand{"sweep-report", "a table of the adapters of one recipe, the best first (Python)"},
    PythonCommand{"doctor", "report graphs, breaks and recompiles of a training step (Python)"},
    PythonCommand{"estimate", "bytes that training takes: base, adapter, activations (Python)"},
};

struct CodeText {
  ExitCode code;
  const char* meaning;
};

constexpr std::array kCodes = {
    CodeText{kOk, "ok"},
    CodeText{kFinding, "a finding, or a threshold passed"},
    CodeText{kUsage, "wrong command line or recipe"},
    CodeText{kBadInput, "wrong data: a file breaks a rule of its format"},
    CodeText{kMismatch, "a manifest or the two sides of a diff disagree"},
    CodeText{kIo, "disk full, no permission, no such file, program or package"},
    CodeText{kMemory, "out of memory"},
    CodeText{kInternal, "failed for a reason that none of these is"},
    CodeText{kInterrupted, "interrupted by Ctrl-C; 143 by SIGTERM"},
};

}  // namespace

std::span<const Command* const> commands() { return kCommands; }
std::span<const PythonCommand> python_commands() { return kPythonCommand; }

std::string_view summary_of(std::string_view command) {
  for (const Command* row : kCommands) {
    if (command == row->name) return row->summary;
  }
  for (const PythonCommand& row : kPythonCommand) {
    if (command == row.name) return row.summary;
  }
  return {};
}

std::string nearest_command(std::string_view word) {
  std::vector<std::string> names;
  names.reserve(kCommands.size() + python_commands().size());
  for (const Command* row : kCommands) names.emplace_back(row->name);
  for (const PythonCommand& row : python_commands()) names.emplace_back(row.name);
  return nearest(word, names);
}

std::string exit_code_text() {
  std::string text = "Exit codes:\n";
  for (const CodeText& row : kCodes) {
    const std::string number = std::to_string(row.code);
    text += "  " + number + std::string(6 - number.size(), ' ') + row.meaning + "\n";
  }
  return text;
}

Program::Program()
    : parser_(
          program_name(),
          std::string("Checkpoints of language models: look inside, quantise, check, compare.\n"
                      "Needs neither Python nor torch") +
              (is_tool_alone() ? "." : ", except for the commands marked (Python)."),
          as_called("monograph COMMAND --help tells more, with examples.\n\n") + exit_code_text(),
          std::string(program_name()) + " " + kVersion) {
  CommandLine root = parser_.root();
  root.require_subcommand();
  for (const Command* command : kCommands) add(root, *command);
  if (is_tool_alone()) return;
  for (const PythonCommand& row : kPythonCommand)
    root.add_foreign_subcommand(row.name, row.summary);
}

void Program::add(CommandLine& parent, const Command& command) {
  CommandLine line =
      parent.add_subcommand(command.name, command.summary, command.description, command.examples);
  Run run = command.declare == nullptr ? nullptr : command.declare(line);
  line.add_flag("-q,--quiet", session_.quiet, "Print results and errors only");
  if (!command.subcommands.empty()) line.require_subcommand();
  for (const Command* below : command.subcommands) add(line, *below);
  if (run) entries_.push_back({line, std::move(run)});
}

int Program::run() {
  for (const Entry& entry : entries_) {
    if (entry.line.was_given()) return entry.run(session_);
  }
  return kUsage;
}

}  // namespace monograph::cli
