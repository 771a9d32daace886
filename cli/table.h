// A table of text for a terminal, or for Markdown.
#pragma once

#include <string>
#include <vector>

namespace monograph::cli {

class Table {
 public:
  // A column whose title begins with '>' is aligned to the right.
  explicit Table(std::vector<std::string> titles);

  void add(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  // Columns two blanks apart, a line under the titles.
  std::string text() const;
  std::string markdown() const;

 private:
  std::vector<std::string> titles_;
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace monograph::cli
