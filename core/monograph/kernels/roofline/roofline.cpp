#include "monograph/kernels/roofline/roofline.h"

#include "monograph/cpu/variant.h"
#include "targets.h"

namespace monograph {

using ProductsFn = double(std::size_t steps);

// Defined in scalar.cpp, avx2.cpp and avx512.cpp; tile_products_with in amx.cpp.
template <class V>
void move_with(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
               std::size_t out_bytes);
template <class V>
double vector_products_with(std::size_t steps);
template <class V>
double tile_products_with(std::size_t steps);

namespace {

const std::vector<Variant<MoveFn>>& move_variants() {
  static const auto rows =
      make_variants<MoveFn>(VectorTargets{}, []<class V>() -> MoveFn* { return move_with<V>; });
  return rows;
}

const std::vector<Variant<ProductsFn>>& tile_variants() {
  static const auto rows = make_variants<ProductsFn>(
      TileTargets{}, []<class V>() -> ProductsFn* { return tile_products_with<V>; });
  return rows;
}

const std::vector<Variant<ProductsFn>>& vector_variants() {
  static const auto rows = make_variants<ProductsFn>(
      VectorTargets{}, []<class V>() -> ProductsFn* { return vector_products_with<V>; });
  return rows;
}

}  // namespace

void move_bytes(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
                std::size_t out_bytes) {
  pick(move_variants())(in, in_bytes, out, out_bytes);
}

double tile_products(std::size_t steps) {
  ProductsFn* run = pick(tile_variants());
  return run == nullptr ? 0.0 : run(steps);
}

double vector_products(std::size_t steps) { return pick(vector_variants())(steps); }

}  // namespace monograph
