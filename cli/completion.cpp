// Completion scripts for bash, zsh and fish, made by walking the tree of options: a new option is
// completed without a change here.
#include <cstdio>
#include <memory>

#include "program.h"

namespace monograph::cli {
namespace {

// Every spelling of every option: "-q", "--quiet".
std::vector<std::string> spellings(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  return names;
}

std::string words(const CLI::App& app) {
  std::string text;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : spellings(*option)) text += (text.empty() ? "" : " ") + name;
  }
  return text;
}

std::vector<const CLI::App*> subcommands(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

// In single quotes for a shell.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string summary(const CLI::App& sub) { return std::string(summary_of(sub.get_name())); }

void print_bash(const CLI::App& app) {
  std::string names;
  for (const CLI::App* sub : subcommands(app)) names += sub->get_name() + " ";
  std::printf(
      "# bash completion for monograph: source it, or save it as\n"
      "# ~/.local/share/bash-completion/completions/monograph\n"
      "_monograph() {\n"
      "  local word=\"${COMP_WORDS[COMP_CWORD]}\" words\n"
      "  if ((COMP_CWORD == 1)); then\n"
      "    words=\"%s%s\"\n"
      "  else\n"
      "    case \"${COMP_WORDS[1]}\" in\n",
      names.c_str(), words(app).c_str());
  for (const CLI::App* sub : subcommands(app)) {
    std::printf("      %s) words=\"%s\" ;;\n", sub->get_name().c_str(), words(*sub).c_str());
  }
  std::printf(
      "    esac\n"
      "  fi\n"
      "  COMPREPLY=()\n"
      "  [[ $word == -* || $COMP_CWORD -eq 1 ]] && COMPREPLY=($(compgen -W \"$words\" -- "
      "\"$word\"))\n"
      "  ((COMP_CWORD > 1)) && COMPREPLY+=($(compgen -f -- \"$word\"))\n"
      "}\n"
      "complete -o filenames -F _monograph monograph\n");
}

void print_zsh(const CLI::App& app) {
  std::printf(
      "#compdef monograph\n"
      "# zsh completion for monograph: save it as _monograph in a folder of $fpath\n"
      "_monograph() {\n"
      "  if ((CURRENT == 2)); then\n"
      "    local -a names=(\n");
  for (const CLI::App* sub : subcommands(app)) {
    std::printf("      %s\n", quoted(sub->get_name() + ":" + summary(*sub)).c_str());
  }
  std::printf(
      "    )\n"
      "    _describe command names\n"
      "    return\n"
      "  fi\n"
      "  local -a options=()\n"
      "  case $words[2] in\n");
  for (const CLI::App* sub : subcommands(app)) {
    std::printf("    %s) options=(", sub->get_name().c_str());
    for (const CLI::Option* option : sub->get_options()) {
      for (const std::string& name : spellings(*option)) {
        std::printf(" %s", quoted(name + ":" + first_line(option->get_description())).c_str());
      }
    }
    std::printf(" ) ;;\n");
  }
  std::printf(
      "  esac\n"
      "  [[ $words[CURRENT] == -* ]] && _describe option options && return\n"
      "  _files\n"
      "}\n"
      "compdef _monograph monograph\n");
}

void print_fish(const CLI::App& app) {
  std::printf(
      "# fish completion for monograph: save it as ~/.config/fish/completions/monograph.fish\n");
  for (const CLI::App* sub : subcommands(app)) {
    std::printf("complete -c monograph -n __fish_use_subcommand -f -a %s -d %s\n",
                sub->get_name().c_str(), quoted(summary(*sub)).c_str());
    for (const CLI::Option* option : sub->get_options()) {
      std::string names;
      for (const std::string& name : option->get_snames()) names += " -s " + name;
      for (const std::string& name : option->get_lnames()) names += " -l " + name;
      if (names.empty()) continue;
      const bool takes_value = option->get_items_expected_max() > 0;
      std::printf("complete -c monograph -n '__fish_seen_subcommand_from %s'%s%s -d %s\n",
                  sub->get_name().c_str(), names.c_str(), takes_value ? " -r" : "",
                  quoted(first_line(option->get_description())).c_str());
    }
  }
}

Run declare(CLI::App& app) {
  auto shell = std::make_shared<std::string>();
  app.add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  return [shell](Session&) -> int {
    Program program;
    if (*shell == "bash") {
      print_bash(program.app());
    } else if (*shell == "zsh") {
      print_zsh(program.app());
    } else {
      print_fish(program.app());
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
