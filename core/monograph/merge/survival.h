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

  void add(double of_base, double meant, double stored) {
    const double wanted = meant - of_base, found = stored - of_base;
    intended += wanted * wanted;
    realised += found * found;
    product += wanted * found;
    base += of_base * of_base;
  }
  Survival& operator+=(const Survival& other) {
    intended += other.intended;
    realised += other.realised;
    product += other.product;
    base += other.base;
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
  // Also where a base that is not finite leaves no cosine.
  bool is_below(double threshold) const { return !(cosine() >= threshold); }
  // The part of the change that is there: its projection on what was meant. 1 is all of it.
  double kept() const { return intended == 0 ? 1 : product / intended; }
};

}  // namespace monograph
