#include "program.h"

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

constexpr std::array kHandedOver = {
    HandedOver{"example", "a small model, data and a recipe to try, offline (Python)"},
    HandedOver{"preprocess", "tokenise and pack a dataset (Python)"},
    HandedOver{"train", "fine-tune from a YAML file (Python)"},
    HandedOver{"generate", "generate text with a checkpoint and an adapter (Python)"},
    HandedOver{"doctor", "report graphs, breaks and recompiles of a training step (Python)"},
    HandedOver{"estimate", "bytes that training takes: base, adapter, activations (Python)"},
};

struct CodeText {
  ExitCode code;
  const char* meaning;
};

constexpr std::array kCodes = {
    CodeText{kOk, "ok"},
    CodeText{kFinding, "a finding, or a threshold passed"},
    CodeText{kUsage, "wrong command line"},
    CodeText{kBadInput, "a file breaks a rule of its format"},
    CodeText{kMismatch, "a manifest or the two sides of a diff disagree"},
    CodeText{kIo, "disk full, no permission, no such file"},
    CodeText{kInterrupted, "interrupted"},
};

// Breaks lines at blanks so that they have at most `width` columns; keeps line feeds.
std::string wrapped(const std::string& text, int width) {
  std::string out, word;
  int column = 0;
  const auto flush = [&] {
    const int length = static_cast<int>(word.size());
    if (column > 0 && column + 1 + length > width) {
      out += '\n';
      column = 0;
    } else if (column > 0 && length > 0) {
      out += ' ';
      ++column;
    }
    out += word;
    column += length;
    word.clear();
  };
  for (const char c : text) {
    if (c != ' ' && c != '\n') {
      word += c;
      continue;
    }
    flush();
    if (c == '\n') {
      out += '\n';
      column = 0;
    }
  }
  flush();
  return out;
}

// The list of commands shows summaries; a description is for the page of its command.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_desc(const CLI::Option* option) const override {
    return wrapped(option->get_description(), 100 - static_cast<int>(get_column_width()));
  }
  std::string make_subcommand(const CLI::App* sub) const override {
    std::stringstream out;
    const std::string summary(summary_of(*sub));
    CLI::detail::format_help(out, sub->get_name(), summary, get_column_width());
    return out.str();
  }
};

std::string indented(const std::string& text) {
  std::string out = "  ";
  for (const char c : text) {
    out += c;
    if (c == '\n') out += "  ";
  }
  return out;
}

}  // namespace

std::span<const Command* const> commands() { return kCommands; }
std::span<const HandedOver> handed_over() { return kHandedOver; }

std::string_view summary_of(std::string_view command) {
  for (const Command* row : kCommands) {
    if (command == row->name) return row->summary;
  }
  for (const HandedOver& row : kHandedOver) {
    if (command == row.name) return row.summary;
  }
  return {};
}

std::string_view summary_of(const CLI::App& app) {
  const CLI::App* parent = app.get_parent();
  for (const Command* row : kCommands) {
    if (parent == nullptr || parent->get_name() != row->name) continue;
    for (const Command* below : row->subcommands) {
      if (app.get_name() == below->name) return below->summary;
    }
  }
  return summary_of(app.get_name());
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
    : app_(
          "Checkpoints of language models: look inside, quantise, check, compare.\n"
          "Needs neither Python nor torch, except for the commands marked (Python).",
          "monograph") {
  app_.set_version_flag("--version", std::string("monograph ") + kVersion);
  app_.require_subcommand(1);
  auto formatter = std::make_shared<HelpFormatter>();
  formatter->column_width(34);
  app_.formatter(formatter);
  app_.footer("monograph COMMAND --help tells more, with examples.\n\n" + exit_code_text());
  for (const Command* command : kCommands) add(app_, *command);
  for (const HandedOver& row : kHandedOver) {
    CLI::App* sub = app_.add_subcommand(row.name, row.summary);
    sub->prefix_command();
  }
}

void Program::add(CLI::App& parent, const Command& command) {
  CLI::App* sub = parent.add_subcommand(command.name, command.summary);
  sub->description(wrapped(command.description, 100) + "\n");
  sub->footer("Examples:\n" + indented(command.examples));
  Run run = command.declare == nullptr ? nullptr : command.declare(*sub);
  sub->add_flag("-q,--quiet", session_.quiet, "Print results and errors only");
  if (!command.subcommands.empty()) sub->require_subcommand(1);
  for (const Command* below : command.subcommands) add(*sub, *below);
  if (run) entries_.push_back({sub, std::move(run)});
}

int Program::run() {
  for (const Entry& entry : entries_) {
    if (entry.app->parsed()) return entry.run(session_);
  }
  return kUsage;
}

}  // namespace monograph::cli
