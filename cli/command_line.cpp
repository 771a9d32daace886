#include "command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <span>

#include "command.h"
#include "failure.h"
#include "model.h"
#include "nearest.h"
#include "program_name.h"

namespace monograph::cli {
namespace {

constexpr int kWidth = 100;

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

std::string indented(const std::string& text) {
  std::string out = "  ";
  for (const char c : text) {
    out += c;
    if (c == '\n') out += "  ";
  }
  return out;
}

// A command with its line for lists of commands.
class Subcommand : public CLI::App {
 public:
  Subcommand(std::string description, const char* name, const char* summary, CLI::App* parent)
      : CLI::App(std::move(description), name, parent), summary_(summary) {}
  const std::string& summary() const { return summary_; }

 private:
  std::string summary_;
};

// Every command but the program itself is one.
std::string summary_of(const CLI::App& app) {
  const auto* command = dynamic_cast<const Subcommand*>(&app);
  return command == nullptr ? "" : command->summary();
}

CLI::App& add_command(CLI::App& parent, std::string description, const char* name,
                      const char* summary) {
  return *parent.add_subcommand(
      std::make_shared<Subcommand>(std::move(description), name, summary, &parent));
}

// The list of commands shows summaries; a description is for the page of its command.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_desc(const CLI::Option* option) const override {
    return wrapped(option->get_description(), kWidth - static_cast<int>(get_column_width()));
  }
  std::string make_subcommand(const CLI::App* sub) const override {
    std::stringstream out;
    CLI::detail::format_help(out, sub->get_name(), summary_of(*sub), get_column_width());
    return out.str();
  }
};

OptionText text_of(const CLI::Option& option) {
  OptionText text;
  text.name = option.get_name(/*positional=*/option.get_positional(), /*all_options=*/true);
  text.short_names = option.get_snames();
  text.long_names = option.get_lnames();
  text.type_name = option.get_type_name();
  text.description = option.get_description();
  text.takes_value = option.get_items_expected_max() > 0;
  return text;
}

CommandText text_of(const CLI::App& app) {
  CommandText text{app.get_name(), summary_of(app), app.get_description(), {}, {}};
  for (const CLI::Option* option : app.get_options()) text.options.push_back(text_of(*option));
  for (const CLI::App* below : app.get_subcommands([](const CLI::App*) { return true; })) {
    text.subcommands.push_back(text_of(*below));
  }
  return text;
}

// "monograph adapter check"
std::string full_name(const CLI::App& command) {
  const CLI::App* above = command.get_parent();
  return (above == nullptr ? "" : full_name(*above) + " ") + command.get_name();
}

std::string unknown(const std::string& kind, const std::string& word, const std::string& meant,
                    const CLI::App& command) {
  return "unknown " + kind + " '" + word + "'" +
         (meant.empty() ? "; " : "; did you mean '" + meant + "'? ") + full_name(command) +
         " --help lists them";
}

// What is wrong with the first long option or subcommand that does not exist; CLI11 would name the
// argument that is missing, or repeat the word.
std::string unknown_word(const CLI::App& program, std::span<char* const> words) {
  const CLI::App* command = &program;
  for (const std::string word : words) {
    if (word == "--") return {};
    const auto below = command->get_subcommands([](const CLI::App*) { return true; });
    if (!word.starts_with("-")) {
      if (below.empty()) continue;
      std::vector<std::string> names;
      names.reserve(below.size());
      for (const CLI::App* each : below) names.push_back(each->get_name());
      const auto at = std::find(names.begin(), names.end(), word);
      if (at == names.end()) return unknown("command", word, nearest(word, names), *command);
      command = below[static_cast<std::size_t>(at - names.begin())];
    } else if (word.starts_with("--")) {
      std::vector<std::string> names;
      for (const CLI::Option* option : command->get_options()) {
        for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
      }
      const std::string name = word.substr(0, word.find('='));
      if (std::find(names.begin(), names.end(), name) != names.end()) continue;
      return unknown("option", name, nearest(name, names), *command);
    }
  }
  return {};
}

}  // namespace

const Option& Option::required() const {
  option_->required();
  return *this;
}

const Option& Option::needs(const Option& other) const {
  option_->needs(other.option_);
  return *this;
}

const Option& Option::excludes(const Option& other) const {
  option_->excludes(other.option_);
  return *this;
}

const Option& Option::repeatable() const {
  option_->allow_extra_args(false);
  return *this;
}

const Option& Option::one_of(const std::vector<std::string>& words) const {
  option_->check(CLI::IsMember(words));
  return *this;
}

const Option& Option::between(int least, int most) const {
  option_->check(CLI::Range(least, most));
  return *this;
}

const Option& Option::between(std::uint64_t least, std::uint64_t most) const {
  option_->check(CLI::Range(least, most));
  return *this;
}

const Option& Option::finite(double least) const {
  const auto wrong = [least](const std::string& text) -> std::string {
    double value = 0;
    if (!CLI::detail::lexical_cast(text, value)) return text + ": wanted a number";
    if (!std::isfinite(value)) return text + ": wanted a finite number";
    return value < least ? text + ": wanted at least " + fixed_text(least, 0) : "";
  };
  option_->check(CLI::Validator(wrong, ""));
  return *this;
}

const Option& Option::check(std::string (*wrong)(const std::string& value)) const {
  option_->check(wrong);
  return *this;
}

const Option& Option::bytes() const {
  option_->transform(CLI::AsSizeValue(/*kb_is_1000=*/true));
  return finite(1);
}

const Option& Option::type_name(const char* name) const {
  option_->type_name(name);
  return *this;
}

const Option& Option::option_text(const char* text) const {
  option_->option_text(text);
  return *this;
}

const Option& Option::shows_default() const {
  option_->capture_default_str();
  return *this;
}

const Option& Option::shows_default(const char* text) const {
  option_->default_str(text);
  return *this;
}

Option CommandLine::add_flag(const char* name, bool& value, const char* description) {
  return Option(app_->add_flag(name, value, description));
}

Option CommandLine::add_option(const char* name, std::string& value, const char* description) {
  return Option(app_->add_option(name, value, description));
}

Option CommandLine::add_option(const char* name, std::vector<std::string>& value,
                               const char* description) {
  return Option(app_->add_option(name, value, description));
}

Option CommandLine::add_option(const char* name, int& value, const char* description) {
  return Option(app_->add_option(name, value, description));
}

Option CommandLine::add_option(const char* name, std::uint64_t& value, const char* description) {
  return Option(app_->add_option(name, value, description));
}

Option CommandLine::add_option(const char* name, std::optional<std::uint64_t>& value,
                               const char* description) {
  return Option(app_->add_option(name, value, description));
}

Option CommandLine::add_option(const char* name, double& value, const char* description) {
  return Option(app_->add_option(name, value, description));
}

Option CommandLine::add_option(const char* name, std::optional<double>& value,
                               const char* description) {
  return Option(app_->add_option(name, value, description));
}

CommandLine CommandLine::add_subcommand(const char* name, const char* summary,
                                        const char* description, const char* examples) {
  CLI::App& command =
      add_command(*app_, wrapped(as_called(description), kWidth) + "\n", name, summary);
  command.footer("Examples:\n" + indented(as_called(examples)));
  return CommandLine(&command);
}

void CommandLine::add_foreign_subcommand(const char* name, const char* summary) {
  add_command(*app_, summary, name, summary).prefix_command();
}

void CommandLine::require_subcommand() { app_->require_subcommand(1); }

bool CommandLine::was_given() const { return app_->parsed(); }

const CommandText& CommandText::subcommand(std::string_view wanted) const {
  return *std::find_if(subcommands.begin(), subcommands.end(),
                       [&](const CommandText& command) { return command.name == wanted; });
}

Parser::Parser(const char* name, const std::string& description, const std::string& footer,
               const std::string& version)
    : app_(std::make_unique<CLI::App>(description, name)) {
  app_->set_version_flag("--version", version);
  auto formatter = std::make_shared<HelpFormatter>();
  formatter->column_width(34);
  app_->formatter(formatter);
  app_->footer(footer);
}

Parser::~Parser() = default;

Parser::Outcome Parser::parse(int argc, char** argv) {
  std::string wrong = unknown_word(*app_, std::span(argv + 1, argv + argc));
  try {
    if (wrong.empty()) {
      app_->parse(argc, argv);
      return Outcome::kParsed;
    }
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {
      app_->exit(error);
      return Outcome::kHelpPrinted;
    }
    const CLI::App* command = app_.get();
    while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
    wrong = error.what() + ("; " + full_name(*command)) + " --help tells more";
  }
  report(wrong.c_str(), kUsage);
  return Outcome::kWrong;
}

CommandText Parser::text() const { return text_of(*app_); }

}  // namespace monograph::cli
