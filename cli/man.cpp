// The man page, from the text that --help prints.
#include <algorithm>
#include <cstdio>

#include "monograph/version.h"
#include "program.h"

namespace monograph::cli {
namespace {

// Text as roff: backslashes and hyphens as themselves, no line that begins with a control
// character.
std::string roff(const std::string& text) {
  std::string out;
  bool line_begins = true;
  for (const char c : text) {
    if (line_begins && (c == '.' || c == '\'')) out += "\\&";
    line_begins = c == '\n';
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
  }
  return out;
}

void print_paragraphs(const std::string& text) {
  std::string body = roff(text);
  for (auto at = body.find("\n\n"); at != std::string::npos; at = body.find("\n\n", at + 4)) {
    body.replace(at, 2, "\n.PP\n");
  }
  std::printf("%s\n", body.c_str());
}

void print_verbatim(const std::string& text) {
  std::printf(".PP\n.nf\n.RS\n%s\n.RE\n.fi\n", roff(text).c_str());
}

void print_options(const CommandText& command) {
  for (const OptionText& option : command.options) {
    std::string name = option.name;
    std::replace(name.begin(), name.end(), ',', ' ');
    const std::string value = option.takes_value ? " " + option.type_name : "";
    std::string shown = roff(name + value);
    // Lists of values may be longer than a line: it may break behind a comma.
    for (auto at = shown.find(','); at != std::string::npos; at = shown.find(',', at + 1)) {
      shown.insert(at + 1, "\\:");
    }
    std::printf(".TP\n.B %s\n%s\n", shown.c_str(), roff(option.description).c_str());
  }
}

// `name` is the whole name: "adapter check".
void print_command(const Command& command, const CommandText& text, const std::string& name) {
  std::printf(".SH MONOGRAPH %s\n", name.c_str());
  print_paragraphs(command.description);
  print_options(text);
  print_verbatim(command.examples);
  for (const Command* below : command.subcommands) {
    print_command(*below, text.subcommand(below->name), name + " " + below->name);
  }
}

Run declare(CommandLine&) {
  return [](Session&) -> int {
    const CommandText program = Program().parser().text();
    std::printf(".TH MONOGRAPH 1 \"\" \"monograph %s\" \"User Commands\"\n", kVersion);
    std::printf(
        ".SH NAME\nmonograph \\- checkpoints of language models: look inside, quantise, "
        "check, compare\n");
    std::printf(".SH SYNOPSIS\n.B monograph\n.I COMMAND\n[options]\n.SH DESCRIPTION\n");
    print_paragraphs(program.description);
    for (const Command* command : commands()) {
      print_command(*command, program.subcommand(command->name), command->name);
    }
    std::printf(".SH COMMANDS OF THE PYTHON PACKAGE\n");
    for (const PythonCommand& row : python_commands()) {
      std::printf(".TP\n.B monograph %s\n%s\n", roff(row.name).c_str(), roff(row.summary).c_str());
    }
    std::printf(".SH EXIT STATUS\n");
    print_verbatim(exit_code_text());
    std::printf(
        ".SH ENVIRONMENT\n.TP\n.B MONOGRAPH_ISA\nCaps the instruction set: scalar, avx2, "
        "avx512, avx512_bf16, amx; on Arm scalar, neon.\n.TP\n.B MONOGRAPH_PYTHON\nThe Python that "
        "runs the commands of "
        "the Python package.\n.TP\n.B MONOGRAPH_TOOL\nThe program that python3 \\-m monograph "
        "hands the other commands to.\n");
    return kOk;
  };
}

}  // namespace

const Command kMan = {
    "man",
    "print the man page",
    "Print the man page of monograph, made from the same text as the help.",
    "monograph man | man -l -\n"
    "monograph man > ~/.local/share/man/man1/monograph.1",
    declare,
};

}  // namespace monograph::cli
