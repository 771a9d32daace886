#include "table.h"

#include <algorithm>

namespace monograph::cli {
namespace {

std::string padded(const std::string& cell, std::size_t width, bool right) {
  const std::string blanks(width - std::min(width, cell.size()), ' ');
  return right ? blanks + cell : cell + blanks;
}

std::string without_trailing_blanks(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace

Table::Table(std::vector<std::string> titles) : titles_(std::move(titles)) {
  for (std::string& title : titles_) {
    right_.push_back(title.starts_with('>'));
    if (right_.back()) title.erase(0, 1);
  }
}

void Table::add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

std::string Table::text() const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < titles_.size(); ++c) {
    widths.push_back(titles_[c].size());
    for (const auto& row : rows_) widths[c] = std::max(widths[c], row[c].size());
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string out;
    for (std::size_t c = 0; c < cells.size(); ++c) {
      out += (c == 0 ? "" : "  ") + padded(cells[c], widths[c], right_[c]);
    }
    return without_trailing_blanks(out) + "\n";
  };
  std::string out = line(titles_);
  std::size_t width = 2 * (widths.size() - 1);
  for (const std::size_t w : widths) width += w;
  out += std::string(width, '-') + "\n";
  for (const auto& row : rows_) out += line(row);
  return out;
}

std::string Table::markdown() const {
  const auto line = [](const std::vector<std::string>& cells) {
    std::string out = "|";
    for (const std::string& cell : cells) {
      out += ' ';
      for (const char c : cell) out += c == '|' ? "\\|" : std::string(1, c);
      out += " |";
    }
    return out + "\n";
  };
  std::string out = line(titles_) + "|";
  for (const bool right : right_) out += right ? "---:|" : "---|";
  out += "\n";
  for (const auto& row : rows_) out += line(row);
  return out;
}

}  // namespace monograph::cli
