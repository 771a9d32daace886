// One kernel, several formats and instruction sets: each row says what one function can run.
// Dispatch, tests and benchmarks all walk the same rows.
#pragma once

#include <vector>

#include "monograph/cpu/isa.h"
#include "monograph/formats/format.h"
#include "monograph/simd/tags.h"

namespace monograph {

template <class Fn>
struct Variant {
  Format format;
  Isa isa;
  Fn* run;
};

// The rows of a kernel for every format, best instruction set first. `lookup` is called as
// lookup.template operator()<V>(format) and gives the function, or nullptr where there is none.
template <class Fn, class Lookup, class... Vs>
std::vector<Variant<Fn>> make_variants(TargetList<Vs...>, Lookup lookup) {
  std::vector<Variant<Fn>> rows;
  const auto add = [&](Format format, Isa isa, Fn* run) {
    if (run != nullptr) rows.push_back({format, isa, run});
  };
  for (const FormatInfo& info : formats())
    (add(info.format, isa_of<Vs>, lookup.template operator()<Vs>(info.format)), ...);
  return rows;
}

// The fastest variant for `format` that this CPU can run under the cap, nullptr if there is none.
template <class Fn>
Fn* pick(const std::vector<Variant<Fn>>& variants, Format format) {
  for (const Variant<Fn>& v : variants)
    if (v.format == format && v.isa <= best_isa()) return v.run;
  return nullptr;
}

}  // namespace monograph
