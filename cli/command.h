// What a subcommand is to the program. One subcommand is one file that defines one Command, and one
// row in the table of main.cpp; help, completion and man page are made from the same text.
#pragma once

#include <functional>
#include <span>

#include "command_line.h"
#include "session.h"
#include "usage_error.h"

namespace monograph::cli {

// The same table stands in `monograph --help`, in the man page, in docs/reference/cli.md and in
// python/monograph/cli/exit_codes.py.
enum ExitCode : int {
  kOk = 0,
  kFinding = 1,    // a finding, or a threshold passed
  kUsage = 2,      // the command line is wrong
  kBadInput = 3,   // a file breaks a rule (monograph::Error)
  kMismatch = 4,   // a manifest or the two sides of a diff disagree
  kIo = 5,         // disk full, no permission, no such file (IoError)
  kMemory = 6,     // the system gave no memory
  kInternal = 70,  // our own mistake, or one of a library
  kInterrupted = 130,
};

// Runs after the command line was parsed; returns an exit code.
using Run = std::function<int(Session& session)>;

struct Command {
  const char* name;
  const char* summary;      // one line, for the list of commands
  const char* description;  // paragraphs separated by an empty line
  const char* examples;     // lines "monograph ...", with comments
  // Declares options on `line` and returns what runs with them; the values live in the closure.
  // Null for a command that only has subcommands.
  Run (*declare)(CommandLine& line);
  std::span<const Command* const> subcommands = {};
};

extern const Command kAdapter;
extern const Command kCompletion;
extern const Command kConvert;
extern const Command kDequantize;
extern const Command kDiff;
extern const Command kExport;
extern const Command kFinetune;
extern const Command kGenerate;
extern const Command kInspect;
extern const Command kMan;
extern const Command kMerge;
extern const Command kQuantize;
extern const Command kVerify;

}  // namespace monograph::cli
