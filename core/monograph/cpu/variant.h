// The registry of a kernel: a row for each thing it is chosen by (the key) and each instruction set
// that has something for it, best first. Dispatch, tests and benchmarks all walk the same rows.
#pragma once

#include <vector>

#include "monograph/cpu/isa.h"
#include "monograph/cpu/tags.h"

namespace monograph {

// The key of a kernel that an instruction set has once.
struct NoKey {
  bool operator==(const NoKey&) const = default;
};

// `Kernel` is a function or a const table of functions; the fields of `Key` are fields of the row.
template <class Kernel, class Key = NoKey>
struct Variant : Key {
  Isa isa;
  Kernel* run;
};

// The rows for `keys`, key by key. `find` is called as find.template operator()<V>(key) and gives
// nullptr where the vocabulary V has nothing for the key.
template <class Kernel, class Key, class Find, class... Vs>
std::vector<Variant<Kernel, Key>> make_variants(TargetList<Vs...>, const std::vector<Key>& keys,
                                                [[maybe_unused]] Find find) {
  std::vector<Variant<Kernel, Key>> rows;
  [[maybe_unused]] const auto add = [&](const Key& key, Isa isa, Kernel* run) {
    if (run != nullptr) rows.push_back({key, isa, run});
  };
  for (const Key& key : keys) (add(key, isa_of<Vs>, find.template operator()<Vs>(key)), ...);
  return rows;
}

// The same for a kernel without a key.
template <class Kernel, class Find, class... Vs>
std::vector<Variant<Kernel>> make_variants(TargetList<Vs...> targets, Find find) {
  return make_variants<Kernel>(targets, std::vector<NoKey>(1),
                               [&]<class V>(NoKey) { return find.template operator()<V>(); });
}

// The best row for a key that the instruction set `limit` can run, nullptr if there is none:
// best_row(rows, limit, format), best_row(rows, limit, dtype, pass).
template <class Kernel, class Key, class... Fields>
const Variant<Kernel, Key>* best_row(const std::vector<Variant<Kernel, Key>>& rows, Isa limit,
                                     Fields... fields) {
  const Key key = {fields...};
  for (const Variant<Kernel, Key>& row : rows)
    if (static_cast<const Key&>(row) == key && row.isa <= limit) return &row;
  return nullptr;
}

// What this CPU runs under the cap, nullptr if there is nothing for the key.
template <class Kernel, class Key, class... Fields>
Kernel* pick(const std::vector<Variant<Kernel, Key>>& rows, Fields... fields) {
  const Variant<Kernel, Key>* row = best_row(rows, best_isa(), fields...);
  return row == nullptr ? nullptr : row->run;
}

}  // namespace monograph
