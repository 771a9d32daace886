#include "monograph/read_ahead/schedule.h"

#include <algorithm>
#include <utility>

namespace monograph {
namespace {

// The share of the allowed bytes that rows of tables may keep.
constexpr std::size_t kScatteredShare = 16;

bool is_scattered(const Piece& piece) { return piece.reading == Reading::kScattered; }

}  // namespace

Schedule::Schedule(std::vector<Piece> pieces, std::size_t units, std::size_t allowed)
    : pieces_(std::move(pieces)),
      pieces_of_(units),
      allowed_(allowed),
      order_(units),
      held_bytes_(pieces_.size()),
      sure_(pieces_.size()),
      visits_(units),
      visit_of_(pieces_.size()) {
  for (std::size_t i = 0; i < pieces_.size(); ++i) pieces_of_[pieces_[i].unit].push_back(i);
}

void Schedule::use(std::size_t unit) {
  if (unit == current()) return;
  if (current() != kNoUnit)
    for (const std::size_t i : pieces_of_[current()]) sure_[i] = false;
  ++visits_[unit];
  order_.use(unit);
}

void Schedule::set_held(std::size_t piece, std::size_t bytes) {
  std::size_t& now = held_bytes_[piece];
  held_ += bytes - now;
  if (is_scattered(pieces_[piece])) scattered_held_ += bytes - now;
  now = bytes;
  sure_[piece] = is_complete(piece);
}

bool Schedule::is_expected(std::size_t piece) const {
  switch (pieces_[piece].reading) {
    case Reading::kWhole:
      return true;
    case Reading::kScattered:
      return false;
    case Reading::kRouted:
      break;
  }
  const std::size_t visit = visit_of_[piece];
  return visit != 0 && visit + 1 >= visits_[pieces_[piece].unit];
}

std::optional<std::size_t> Schedule::missing_of(std::size_t unit, bool unsure) const {
  for (const std::size_t i : pieces_of_[unit])
    if (is_expected(i) && (!is_complete(i) || (unsure && !sure_[i]))) return i;
  return {};
}

// Of the next unit also what is believed to be there: the system may have taken it, and reading
// again what is there costs no more than a look at the page tables.
std::optional<Schedule::Need> Schedule::soonest_missing() const {
  if (current() != kNoUnit)
    if (const auto piece = missing_of(current(), false)) return Need{*piece, 0};
  const std::vector<std::size_t>& upcoming = order_.upcoming();
  for (std::size_t step = 1; step <= upcoming.size(); ++step)
    if (const auto piece = missing_of(upcoming[step - 1], step == 1)) return Need{*piece, step};
  return {};
}

std::optional<std::size_t> Schedule::scattered_too_many() const {
  if (scattered_held_ <= allowed_ / kScatteredShare) return {};
  for (std::size_t i = 0; i < pieces_.size(); ++i)
    if (is_scattered(pieces_[i]) && held_bytes_[i] > 0) return i;
  return {};
}

std::optional<std::size_t> Schedule::farthest_after(std::size_t step, std::size_t needed) const {
  const std::vector<std::size_t>& upcoming = order_.upcoming();
  std::vector<std::size_t> distance(pieces_of_.size(), kNoUnit);
  for (std::size_t at = upcoming.size(); at-- > 0;)
    if (at + 1 > step || step == kNoUnit) distance[upcoming[at]] = at + 1;
  const bool now = step == kNoUnit || step <= 1;
  if (now && needed != kNoUnit) distance[needed] = 0;
  if (step != kNoUnit && step >= 1) distance[upcoming[step - 1]] = 0;
  if (step != kNoUnit && step >= 2) distance[upcoming[step - 2]] = 0;
  std::optional<std::size_t> found;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const std::size_t use = distance[pieces_[i].unit];
    if (is_scattered(pieces_[i]) || held_bytes_[i] == 0 || use == 0) continue;
    if (!found || use > distance[pieces_[*found].unit]) found = i;
  }
  if (!found || now) return found;
  // In use until then: later.
  if (pieces_[*found].unit == current()) return {};
  const auto end = upcoming.begin() + static_cast<std::ptrdiff_t>(step);
  if (std::find(upcoming.begin(), end, pieces_[*found].unit) != end) return {};
  return found;
}

Schedule::Action Schedule::next(std::optional<std::size_t> wanted) const {
  if (const auto piece = scattered_too_many()) return {Kind::kDrop, *piece};
  std::optional<Need> need = soonest_missing();
  if (wanted) need = Need{*wanted, 0};
  if (need && held_ + pieces_[need->piece].bytes - held_bytes_[need->piece] <= allowed_)
    return {Kind::kRead, need->piece};
  if (!need && held_ <= allowed_) return {};
  // Over the allowed: whatever is farthest, now.
  const bool at_once = wanted || held_ > allowed_;
  // Who waits may be another thread in another unit.
  const std::size_t needed = wanted ? pieces_[*wanted].unit : current();
  if (const auto piece = farthest_after(at_once ? kNoUnit : need->step, needed))
    return {Kind::kDrop, *piece};
  return wanted ? Action{Kind::kRead, *wanted} : Action{};
}

}  // namespace monograph
