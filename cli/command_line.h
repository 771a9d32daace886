// Options as the subcommands declare them. CLI11 does the work, and command_line.cpp alone includes
// it: its header takes several seconds to compile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace monograph::cli {

// One option, flag or argument of a CommandLine, which it must not outlive. The calls can be
// chained.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  const Option& required() const;
  const Option& needs(const Option& other) const;
  const Option& excludes(const Option& other) const;
  // One value each time it is given; a list takes all that follow otherwise.
  const Option& repeatable() const;

  // What a value must be. Text of `wrong`: empty if it is right, else what is wrong.
  const Option& one_of(const std::vector<std::string>& words) const;
  const Option& between(int least, int most) const;
  const Option& between(std::uint64_t least, std::uint64_t most) const;
  // Neither NaN nor infinite.
  const Option& finite(double least = std::numeric_limits<double>::lowest()) const;
  const Option& check(std::string (*wrong)(const std::string& value)) const;
  // A number of bytes, at least 1, also in decimal units: 512MB, 5GB.
  const Option& bytes() const;

  // Help: the name of the value, all that follows the option's name, the default.
  const Option& type_name(const char* name) const;
  const Option& option_text(const char* text) const;
  const Option& shows_default() const;
  const Option& shows_default(const char* text) const;

 private:
  CLI::Option* option_;
};

// What one command reads of the command line. Values are written while it is parsed, so what they
// are bound to must live until then. A name without hyphens is an argument by its place.
class CommandLine {
 public:
  explicit CommandLine(CLI::App* app) : app_(app) {}

  Option add_flag(const char* name, bool& value, const char* description);
  Option add_option(const char* name, std::string& value, const char* description);
  Option add_option(const char* name, std::vector<std::string>& value, const char* description);
  Option add_option(const char* name, int& value, const char* description);
  Option add_option(const char* name, std::uint64_t& value, const char* description);
  Option add_option(const char* name, std::optional<std::uint64_t>& value, const char* description);
  Option add_option(const char* name, double& value, const char* description);
  Option add_option(const char* name, std::optional<double>& value, const char* description);

  // A command below this one; `description` is for its own page.
  CommandLine add_subcommand(const char* name, const char* summary, const char* description,
                             const char* examples);
  // One whose arguments are not looked at.
  void add_foreign_subcommand(const char* name, const char* summary);
  void require_subcommand();
  bool was_given() const;

 private:
  CLI::App* app_;
};

// What help, completion and man page say of an option.
struct OptionText {
  std::string name;                                  // every spelling, with commas between them
  std::vector<std::string> short_names, long_names;  // without hyphens; none of an argument
  std::string type_name, description;
  bool takes_value = false;
};

struct CommandText {
  std::string name, summary, description;
  std::vector<OptionText> options;
  std::vector<CommandText> subcommands;

  // There must be one of this name.
  const CommandText& subcommand(std::string_view wanted) const;
};

class Parser {
 public:
  Parser(const char* name, const std::string& description, const std::string& footer,
         const std::string& version);
  ~Parser();

  CommandLine root() { return CommandLine(app_.get()); }
  enum class Outcome : std::uint8_t { kParsed, kHelpPrinted, kWrong };
  // Prints help and version to stdout, what is wrong to stderr.
  Outcome parse(int argc, char** argv);
  CommandText text() const;

 private:
  std::unique_ptr<CLI::App> app_;
};

}  // namespace monograph::cli
