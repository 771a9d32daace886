#include "monograph/kernels/limits/limits.h"

#include "targets.h"

namespace monograph {

template <class V>
void move_with(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
               std::size_t out_bytes);
template <class V>
double tile_products_with(std::size_t steps);

namespace {

// Which vocabularies have a loop of their own.
template <class V>
inline constexpr bool kMoves = false;
template <>
inline constexpr bool kMoves<simd::Scalar> = true;
template <>
inline constexpr bool kMoves<simd::Avx512> = true;
template <class V>
inline constexpr bool kTiles = false;
template <>
inline constexpr bool kTiles<simd::Amx> = true;

template <class V>
void take_move(MoveFn*& run) {
  if constexpr (kMoves<V>)
    if (run == nullptr && isa_of<V> <= best_isa()) run = move_with<V>;
}

template <class V>
void take_tiles(double (*&run)(std::size_t)) {
  if constexpr (kTiles<V>)
    if (run == nullptr && isa_of<V> <= best_isa()) run = tile_products_with<V>;
}

template <class... Vs>
MoveFn* find_move(TargetList<Vs...>) {
  MoveFn* run = nullptr;
  (take_move<Vs>(run), ...);
  return run;
}

template <class... Vs>
auto find_tiles(TargetList<Vs...>) {
  double (*run)(std::size_t) = nullptr;
  (take_tiles<Vs>(run), ...);
  return run;
}

}  // namespace

void move_bytes(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
                std::size_t out_bytes) {
  find_move(VectorTargets{})(in, in_bytes, out, out_bytes);
}

double tile_products(std::size_t steps) {
  const auto run = find_tiles(MatrixTargets{});
  return run == nullptr ? 0.0 : run(steps);
}

}  // namespace monograph
