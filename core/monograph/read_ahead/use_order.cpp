#include "monograph/read_ahead/use_order.h"

#include <algorithm>

namespace monograph {
namespace {

// Contexts of a model that goes through its units in one order are a few per unit; one that has no
// order would fill memory.
constexpr std::size_t kContextsPerUnit = 64;
// A pass up and down, twice: enough to meet every unit that is used at all.
constexpr std::size_t kPassesForeseen = 4;

template <class Context>
Context shifted(const Context& context, std::size_t unit) {
  Context next = context;
  std::rotate(next.begin(), next.begin() + 1, next.end());
  next.back() = unit;
  return next;
}

}  // namespace

std::size_t UseOrder::Hash::operator()(const Context& context) const {
  std::size_t hash = 0;
  for (const std::size_t unit : context) hash = hash * 1000003 + unit + 1;
  return hash;
}

UseOrder::UseOrder(std::size_t units) : units_(units) { foresee(); }

void UseOrder::use(std::size_t unit) {
  if (unit == current()) return;
  if (current() != kNoUnit) {
    if (followers_.size() > kContextsPerUnit * units_) followers_.clear();
    followers_[last_] = unit;
  }
  last_ = shifted(last_, unit);
  foresee();
}

std::size_t UseOrder::after(const Context& context) const {
  if (const auto found = followers_.find(context); found != followers_.end()) return found->second;
  const std::size_t before = context[2], now = context[3];
  if (now == kNoUnit || units_ == 1) return 0;
  const bool up = before == kNoUnit || now > before;
  if (up) return now + 1 < units_ ? now + 1 : now - 1;
  return now > 0 ? now - 1 : 1;
}

void UseOrder::foresee() {
  upcoming_.clear();
  Context context = last_;
  for (std::size_t step = 0; step < kPassesForeseen * units_; ++step) {
    upcoming_.push_back(after(context));
    context = shifted(context, upcoming_.back());
  }
}

}  // namespace monograph
