// Completion scripts for bash, zsh and fish, made by walking the tree of options: a new option is
// completed without a change here.
#include <cstdio>
#include <memory>

#include "program.h"
#include "program_name.h"

namespace monograph::cli {
namespace {

// Every spelling of every option: "-q", "--quiet".
std::vector<std::string> spellings(const OptionText& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.short_names) names.push_back("-" + name);
  for (const std::string& name : option.long_names) names.push_back("--" + name);
  return names;
}

std::string words(const CommandText& command) {
  std::string text;
  for (const OptionText& option : command.options) {
    for (const std::string& name : spellings(option)) text += (text.empty() ? "" : " ") + name;
  }
  return text;
}

// In single quotes for a shell.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string names_of(const std::vector<CommandText>& subs) {
  std::string names;
  for (const CommandText& sub : subs) names += (names.empty() ? "" : " ") + sub.name;
  return names;
}

void print_bash(const CommandText& command) {
  std::printf(
      "# bash completion for monograph: source it, or save it as\n"
      "# ~/.local/share/bash-completion/completions/monograph\n"
      "_monograph() {\n"
      "  local word=\"${COMP_WORDS[COMP_CWORD]}\" words named=1\n"
      "  if ((COMP_CWORD == 1)); then\n"
      "    words=\"%s %s\"\n"
      "  else\n"
      "    case \"${COMP_WORDS[1]}\" in\n",
      names_of(command.subcommands).c_str(), words(command).c_str());
  for (const CommandText& sub : command.subcommands) {
    const std::vector<CommandText>& below = sub.subcommands;
    const std::string names = below.empty() ? "" : names_of(below) + " ";
    std::printf("      %s) words=\"%s%s\"", sub.name.c_str(), names.c_str(), words(sub).c_str());
    if (!below.empty()) {
      std::printf(
          "\n        named=2\n        ((COMP_CWORD > 2)) && case \"${COMP_WORDS[2]}\" in\n");
      for (const CommandText& one : below) {
        std::printf("          %s) words=\"%s\" ;;\n", one.name.c_str(), words(one).c_str());
      }
      std::printf("        esac");
    }
    std::printf(" ;;\n");
  }
  std::printf(
      "    esac\n"
      "  fi\n"
      "  COMPREPLY=()\n"
      "  [[ $word == -* || $COMP_CWORD -le $named ]] && COMPREPLY=($(compgen -W \"$words\" -- "
      "\"$word\"))\n"
      "  ((COMP_CWORD > named)) && COMPREPLY+=($(compgen -f -- \"$word\"))\n"
      "}\n"
      "complete -o filenames -F _monograph %s\n",
      program_name());
}

void print_zsh_options(const CommandText& command) {
  std::printf("options=(");
  for (const OptionText& option : command.options) {
    for (const std::string& name : spellings(option)) {
      std::printf(" %s", quoted(name + ":" + first_line(option.description)).c_str());
    }
  }
  std::printf(" )");
}

void print_zsh(const CommandText& command) {
  std::printf(
      "#compdef %s\n"
      "# zsh completion for monograph: save it as _monograph in a folder of $fpath\n"
      "_monograph() {\n"
      "  if ((CURRENT == 2)); then\n"
      "    local -a names=(\n",
      program_name());
  for (const CommandText& sub : command.subcommands) {
    std::printf("      %s\n", quoted(sub.name + ":" + sub.summary).c_str());
  }
  std::printf(
      "    )\n"
      "    _describe command names\n"
      "    return\n"
      "  fi\n"
      "  local -a options=()\n"
      "  case $words[2] in\n");
  for (const CommandText& sub : command.subcommands) {
    const std::vector<CommandText>& below = sub.subcommands;
    std::printf("    %s) ", sub.name.c_str());
    print_zsh_options(sub);
    if (!below.empty()) {
      std::printf("\n      if ((CURRENT == 3)); then\n        local -a below=(");
      for (const CommandText& one : below) {
        std::printf(" %s", quoted(one.name + ":" + one.summary).c_str());
      }
      std::printf(" )\n        _describe command below && return\n      fi\n");
      std::printf("      case $words[3] in\n");
      for (const CommandText& one : below) {
        std::printf("        %s) ", one.name.c_str());
        print_zsh_options(one);
        std::printf(" ;;\n");
      }
      std::printf("      esac");
    }
    std::printf(" ;;\n");
  }
  std::printf(
      "  esac\n"
      "  [[ $words[CURRENT] == -* ]] && _describe option options && return\n"
      "  _files\n"
      "}\n"
      "compdef _monograph %s\n",
      program_name());
}

void print_fish_options(const CommandText& command, const std::string& when) {
  for (const OptionText& option : command.options) {
    std::string names;
    for (const std::string& name : option.short_names) names += " -s " + name;
    for (const std::string& name : option.long_names) names += " -l " + name;
    if (names.empty()) continue;
    std::printf("complete -c %s -n '%s'%s%s -d %s\n", program_name(), when.c_str(), names.c_str(),
                option.takes_value ? " -r" : "", quoted(first_line(option.description)).c_str());
  }
}

void print_fish(const CommandText& command) {
  std::printf(
      "# fish completion for monograph: save it as ~/.config/fish/completions/monograph.fish\n");
  for (const CommandText& sub : command.subcommands) {
    std::printf("complete -c %s -n __fish_use_subcommand -f -a %s -d %s\n", program_name(),
                sub.name.c_str(), quoted(sub.summary).c_str());
    print_fish_options(sub, "__fish_seen_subcommand_from " + sub.name);
    const std::vector<CommandText>& below = sub.subcommands;
    for (const CommandText& one : below) {
      const std::string inside = "__fish_seen_subcommand_from " + sub.name + "; and ";
      std::printf("complete -c %s -n '%snot __fish_seen_subcommand_from %s' -f -a %s -d %s\n",
                  program_name(), inside.c_str(), names_of(below).c_str(), one.name.c_str(),
                  quoted(one.summary).c_str());
      print_fish_options(one, inside + "__fish_seen_subcommand_from " + one.name);
    }
  }
}

Run declare(CommandLine& line) {
  auto shell = std::make_shared<std::string>();
  line.add_option("shell", *shell, "bash, zsh or fish").required().one_of({"bash", "zsh", "fish"});
  return [shell](Session&) -> int {
    const CommandText program = Program().parser().text();
    if (*shell == "bash") {
      print_bash(program);
    } else if (*shell == "zsh") {
      print_zsh(program);
    } else {
      print_fish(program);
    }
    return kOk;
  };
}

}  // namespace

const Command kCompletion = {
    "completion",
    "print a completion script for bash, zsh or fish",
    "Print a completion script for a shell. The first lines of the script say where to put it.",
    "monograph completion bash > ~/.local/share/bash-completion/completions/monograph\n"
    "monograph completion fish > ~/.config/fish/completions/monograph.fish",
    declare,
};

}  // namespace monograph::cli
