// Which unit of a model is used next: as it was after the same four units the last time, and
// before there was a last time up to the end and back, as forward and backward go. Four tell the
// layers of a checkpointed segment in forward from those that backward computes again.
#pragma once

#include <array>
#include <cstddef>
#include <limits>
#include <unordered_map>
#include <vector>

namespace monograph {

inline constexpr std::size_t kNoUnit = std::numeric_limits<std::size_t>::max();

class UseOrder {
 public:
  explicit UseOrder(std::size_t units);

  // A unit is used; the same one again is no step.
  void use(std::size_t unit);
  std::size_t current() const { return last_.back(); }

  // The units that will be used, the next one first; no two neighbours are the same. Long enough
  // that a unit which is not among them is not used at all.
  const std::vector<std::size_t>& upcoming() const { return upcoming_; }

 private:
  using Context = std::array<std::size_t, 4>;
  struct Hash {
    std::size_t operator()(const Context& context) const;
  };
  std::size_t after(const Context& context) const;
  void foresee();

  std::size_t units_;
  Context last_ = {kNoUnit, kNoUnit, kNoUnit, kNoUnit};
  std::unordered_map<Context, std::size_t, Hash> followers_;
  std::vector<std::size_t> upcoming_;
};

}  // namespace monograph
