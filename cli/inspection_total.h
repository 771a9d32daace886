// What inspect adds up, of a folder as of a GGUF file.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "model.h"
#include "session.h"
#include "table.h"

namespace monograph::cli {

struct InspectionTotal {
  std::uint64_t tensors = 0, elements = 0, size_bytes = 0;

  void add(std::uint64_t of_one, std::uint64_t bytes_of_one) {
    ++tensors;
    elements += of_one;
    size_bytes += bytes_of_one;
  }
  double bits() const {
    return elements == 0 ? 0
                         : 8.0 * static_cast<double>(size_bytes) / static_cast<double>(elements);
  }
};

inline json::Value count_json(std::uint64_t value) {
  return json::Value::number(static_cast<std::int64_t>(value));
}

inline json::Value total_json(const InspectionTotal& total) {
  json::Value value;
  value.set("tensors", count_json(total.tensors));
  value.set("weights", count_json(total.elements));
  value.set("bytes", count_json(total.size_bytes));
  value.set("bits_per_weight", json::Value::number(total.bits()));
  return value;
}

// The first column is the name.
inline void add_total(Table& table, const std::string& name, const InspectionTotal& total) {
  table.add({name, std::to_string(total.tensors), count_text(total.elements),
             fixed_text(total.bits(), 2), bytes_text(total.size_bytes)});
}

inline Table totals_table(const std::string& title) {
  return Table({title, ">tensors", ">weights", ">bits", ">size"});
}

inline void print_table(const Table& table, bool markdown) {
  std::fputs((markdown ? table.markdown() : table.text()).c_str(), stdout);
  std::fputc('\n', stdout);
}

}  // namespace monograph::cli
