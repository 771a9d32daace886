#include "program.h"

#include <algorithm>
#include <array>

#include "monograph/version.h"

namespace monograph::cli {
namespace {

constexpr std::array kCommands = {
    &kInspect,     // what is there
    &kQuantize,    // another folder from it
    &kDequantize,  //
    &kMerge,       //
    &kExport,      // one file for other programs
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
    PythonCommand{"generate", "generate text with a checkpoint and an adapter (Python)"},
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
    CodeText{kInternal, "failed for a reason that none of these is"},
    CodeText{kInterrupted, "interrupted by Ctrl-C; 143 by SIGTERM"},
};

// More than this many letters, and it was no mistake in typing.
constexpr std::size_t kFarthest = 2;

// Letters to insert, remove, replace, or exchange with the next one.
std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> edits(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        edits[i][j] = i + j;
        continue;
      }
      const std::size_t replaced = edits[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      edits[i][j] = std::min({edits[i - 1][j] + 1, edits[i][j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        edits[i][j] = std::min(edits[i][j], edits[i - 2][j - 2] + 1);
      }
    }
  }
  return edits[a.size()][b.size()];
}

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
  std::string nearest;
  std::size_t least = kFarthest + 1;
  const auto look = [&](std::string_view name) {
    const bool begins = word.size() >= 2 && name.starts_with(word);
    const std::size_t distance = begins ? 1 : edits_between(word, name);
    if (distance < least && distance < name.size()) {
      least = distance;
      nearest = name;
    }
  };
  for (const Command* row : kCommands) look(row->name);
  for (const PythonCommand& row : kPythonCommand) look(row.name);
  return nearest;
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
    : parser_("monograph",
              "Checkpoints of language models: look inside, quantise, check, compare.\n"
              "Needs neither Python nor torch, except for the commands marked (Python).",
              "monograph COMMAND --help tells more, with examples.\n\n" + exit_code_text(),
              std::string("monograph ") + kVersion) {
  CommandLine root = parser_.root();
  root.require_subcommand();
  for (const Command* command : kCommands) add(root, *command);
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
