// What to read into memory next and what to let go for it, so that no more than an allowed number
// of bytes is held. Knows no addresses and no threads.
//
// The unit that is used soonest of those not there is read as early as there is room. Room is made
// by the unit whose use after that is farthest, as soon as it is not used before. So no more is
// read than if everything were read at the moment of its use with the best choice of what to let go
// (for a model that goes up and down 2 (all - allowed) bytes each time, the least there is), and
// the reads are spread over the whole of the way.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "monograph/read_ahead/use_order.h"

namespace monograph {

enum class Reading {
  kWhole,      // used whenever its unit is
  kScattered,  // a table of which few rows are used, by operators that do not tell: not read ahead,
               // let go if such pieces hold too much
  kRouted,     // an expert: read ahead if it was used when its unit was used last
};

struct Piece {
  std::size_t unit = 0;
  std::size_t bytes = 0;
  Reading reading = Reading::kWhole;
};

class Schedule {
 public:
  enum class Kind { kNothing, kRead, kDrop };
  struct Action {
    Kind kind = Kind::kNothing;
    std::size_t piece = 0;
  };

  Schedule(std::vector<Piece> pieces, std::size_t units, std::size_t allowed);

  // A step to another unit.
  void use(std::size_t unit);
  std::size_t current() const { return order_.current(); }

  // A piece of the current unit is used.
  void use_piece(std::size_t piece) { visit_of_[piece] = visits_[pieces_[piece].unit]; }

  // `wanted`: a piece that somebody waits for. It is read whatever it costs.
  Action next(std::optional<std::size_t> wanted) const;

  // What came of an action, or was found by measuring. A piece that is there in part counts with
  // its part and is still to be read.
  void set_held(std::size_t piece, std::size_t bytes);
  // Found to be there by reading it again: until its unit has been used.
  bool is_sure(std::size_t piece) const { return sure_[piece]; }
  bool is_complete(std::size_t piece) const { return held_bytes_[piece] == pieces_[piece].bytes; }
  std::size_t held() const { return held_; }
  std::size_t allowed() const { return allowed_; }
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  struct Need {
    std::size_t piece, step;  // of upcoming(); 0 is the current unit, 1 the next one
  };
  std::optional<Need> soonest_missing() const;
  // What is used last after `step`, of all but the unit of that step and the one before, beside
  // which it is read. Nothing if it is in use until then. kNoUnit: of all but the current unit, or
  // but `needed` instead of it.
  std::optional<std::size_t> farthest_after(std::size_t step, std::size_t needed) const;
  std::optional<std::size_t> missing_of(std::size_t unit, bool unsure) const;
  std::optional<std::size_t> scattered_too_many() const;
  bool is_expected(std::size_t piece) const;

  std::vector<Piece> pieces_;
  std::vector<std::vector<std::size_t>> pieces_of_;  // of each unit
  std::size_t allowed_;
  UseOrder order_;
  std::vector<std::size_t> held_bytes_;
  std::vector<bool> sure_;
  std::vector<std::size_t> visits_;    // of each unit
  std::vector<std::size_t> visit_of_;  // in which each piece was used last
  std::size_t held_ = 0, scattered_held_ = 0;
};

}  // namespace monograph
