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

std::string summary(const CLI::App& sub) { return std::string(summary_of(sub)); }

std::string names_of(const std::vector<const CLI::App*>& subs) {
  std::string names;
  for (const CLI::App* sub : subs) names += (names.empty() ? "" : " ") + sub->get_name();
  return names;
}

void print_bash(const CLI::App& app) {
  std::printf(
      "# bash completion for monograph: source it, or save it as\n"
      "# ~/.local/share/bash-completion/completions/monograph\n"
      "_monograph() {\n"
      "  local word=\"${COMP_WORDS[COMP_CWORD]}\" words named=1\n"
      "  if ((COMP_CWORD == 1)); then\n"
      "    words=\"%s %s\"\n"
      "  else\n"
      "    case \"${COMP_WORDS[1]}\" in\n",
      names_of(subcommands(app)).c_str(), words(app).c_str());
  for (const CLI::App* sub : subcommands(app)) {
    const std::vector<const CLI::App*> below = subcommands(*sub);
    const std::string names = below.empty() ? "" : names_of(below) + " ";
    std::printf("      %s) words=\"%s%s\"", sub->get_name().c_str(), names.c_str(),
                words(*sub).c_str());
    if (!below.empty()) {
      std::printf(
          "\n        named=2\n        ((COMP_CWORD > 2)) && case \"${COMP_WORDS[2]}\" in\n");
      for (const CLI::App* one : below) {
        std::printf("          %s) words=\"%s\" ;;\n", one->get_name().c_str(),
                    words(*one).c_str());
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
      "complete -o filenames -F _monograph monograph\n");
}

void print_zsh_options(const CLI::App& app) {
  std::printf("options=(");
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : spellings(*option)) {
      std::printf(" %s", quoted(name + ":" + first_line(option->get_description())).c_str());
    }
  }
  std::printf(" )");
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
    const std::vector<const CLI::App*> below = subcommands(*sub);
    std::printf("    %s) ", sub->get_name().c_str());
    print_zsh_options(*sub);
    if (!below.empty()) {
      std::printf("\n      if ((CURRENT == 3)); then\n        local -a below=(");
      for (const CLI::App* one : below) {
        std::printf(" %s", quoted(one->get_name() + ":" + summary(*one)).c_str());
      }
      std::printf(" )\n        _describe command below && return\n      fi\n");
      std::printf("      case $words[3] in\n");
      for (const CLI::App* one : below) {
        std::printf("        %s) ", one->get_name().c_str());
        print_zsh_options(*one);
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
      "compdef _monograph monograph\n");
}

void print_fish_options(const CLI::App& app, const std::string& when) {
  for (const CLI::Option* option : app.get_options()) {
    std::string names;
    for (const std::string& name : option->get_snames()) names += " -s " + name;
    for (const std::string& name : option->get_lnames()) names += " -l " + name;
    if (names.empty()) continue;
    const bool takes_value = option->get_items_expected_max() > 0;
    std::printf("complete -c monograph -n '%s'%s%s -d %s\n", when.c_str(), names.c_str(),
                takes_value ? " -r" : "", quoted(first_line(option->get_description())).c_str());
  }
}

void print_fish(const CLI::App& app) {
  std::printf(
      "# fish completion for monograph: save it as ~/.config/fish/completions/monograph.fish\n");
  for (const CLI::App* sub : subcommands(app)) {
    std::printf("complete -c monograph -n __fish_use_subcommand -f -a %s -d %s\n",
                sub->get_name().c_str(), quoted(summary(*sub)).c_str());
    print_fish_options(*sub, "__fish_seen_subcommand_from " + sub->get_name());
    const std::vector<const CLI::App*> below = subcommands(*sub);
    for (const CLI::App* one : below) {
      const std::string inside = "__fish_seen_subcommand_from " + sub->get_name() + "; and ";
      std::printf(
          "complete -c monograph -n '%snot __fish_seen_subcommand_from %s' -f -a %s -d %s\n",
          inside.c_str(), names_of(below).c_str(), one->get_name().c_str(),
          quoted(summary(*one)).c_str());
      print_fish_options(*one, inside + "__fish_seen_subcommand_from " + one->get_name());
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
