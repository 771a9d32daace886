// How much of a change reaches the output: the change as it was meant, in fp64, against the change
// of the values that are stored.
#pragma once

#include <cmath>
#include <cstddef>

namespace monograph {

struct Survival {
  double intended = 0;  // sum of squares of what was meant
  double realised = 0;  // sum of squares of what is stored
  double product = 0;   // sum of their products
  double base = 0;      // sum of squares of the base
  // Along the directions of the adapter (all directions, if the change is none of low rank): sums
  // of squares of the error and of what was meant.
  double error_along = 0, meant_along = 0;

  Survival& operator+=(const Survival& other) {
    intended += other.intended;
    realised += other.realised;
    product += other.product;
    base += other.base;
    error_along += other.error_along;
    meant_along += other.meant_along;
    return *this;
  }

  double intended_norm() const { return std::sqrt(intended); }
  double realised_norm() const { return std::sqrt(realised); }
  double base_norm() const { return std::sqrt(base); }
  // 1 where nothing was meant to change; 0 where the whole change was lost.
  double cosine() const {
    if (intended == 0) return 1;
    return realised == 0 ? 0 : product / (std::sqrt(intended) * std::sqrt(realised));
  }
  // The part of the change that is there: its projection on what was meant. 1 is all of it. What
  // was meant by a LoRA lies in its directions: it is the part along them, too.
  double kept() const { return intended == 0 ? 1 : product / intended; }
  // How long the error along the adapter's directions is, relative to the change along them.
  double error_along_adapter() const {
    return meant_along == 0 ? 0 : std::sqrt(error_along / meant_along);
  }
  // Also where a base that is not finite leaves no number.
  bool keeps_less_than(double threshold) const { return !(kept() >= threshold); }
  bool errs_more_than(double threshold) const { return !(error_along_adapter() <= threshold); }
};

}  // namespace monograph
