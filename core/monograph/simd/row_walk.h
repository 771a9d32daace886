// A walk over the elements of a row in the order that gives the same bits on every instruction set:
// blocks of 64 elements, each on 64 lanes of which a vector holds some. A sum has one accumulator a
// lane and folds the lanes in halves at the end; nothing is fused.
#pragma once

#include <utility>

#include "monograph/simd/row_lanes.h"

namespace monograph {

inline constexpr std::size_t kRowBlock = 64;

template <class V>
struct RowWalk {
  using L = RowLanes<V>;
  using F32 = typename L::F32;
  static constexpr std::size_t kLanes = L::kLanes, kVectors = kRowBlock / kLanes;

  // body(k) for k < n; a constant where n vectors fit the registers.
  template <std::size_t n, class Body>
  [[gnu::always_inline]] static void each_below(Body body) {
    if constexpr (n <= 8) {
      const auto all = [&]<std::size_t... k>(std::index_sequence<k...>)
          __attribute__((always_inline)) {
        (body(k), ...);
      };
      all(std::make_index_sequence<n>{});
    } else {
      for (std::size_t k = 0; k < n; ++k) body(k);
    }
  }
  [[gnu::always_inline]] static std::size_t lanes_left(std::size_t elements) {
    return kLanes > 1 && elements < kLanes ? elements : kLanes;
  }
  template <class Body>
  [[gnu::always_inline]] static void each_of_block(Body body) {
    each_below<kVectors>(body);
  }

  // body(place, vector, count): `count` elements from `place` on lie in this vector of the block.
  template <class Body>
  [[gnu::always_inline]] static void each(std::size_t size, Body body) {
    std::size_t i = 0;
    for (; i + kRowBlock <= size; i += kRowBlock)
      each_of_block([&](std::size_t k)
                        __attribute__((always_inline)) { body(i + k * kLanes, k, kLanes); });
    if (i == size) return;
    each_of_block([&](std::size_t k) __attribute__((always_inline)) {
      // One body for whole and for part vectors: two would be most of what is compiled.
      const std::size_t at = i + k * kLanes;
      if (at < size) body(at, k, lanes_left(size - at));
    });
  }

  // body(place, count) where no element knows another: in any order.
  template <class Body>
  [[gnu::always_inline]] static void each_alone(std::size_t size, Body body) {
    std::size_t i = 0;
    for (; i + kLanes <= size; i += kLanes) body(i, kLanes);
    if (i < size) body(i, size - i);
  }

  // Two whole vectors in the order of load_two, or a part of one, of elements that know no other.
  struct Pair {
    static constexpr std::size_t kCount = 2;
    std::size_t place;
    template <class T>
    [[gnu::always_inline]] void load(const T* p, F32* x) const {
      L::load_two(p + place, x[0], x[1]);
    }
    template <class T>
    [[gnu::always_inline]] void store(T* p, const F32* x) const {
      L::store_two(p + place, x[0], x[1]);
    }
    // Numbers beside elements of T.
    template <class T>
    [[gnu::always_inline]] void load_beside(const float* p, F32* x) const {
      L::load_two(p + place, x[0], x[1]);
      L::template ordered_as<T>(x[0], x[1]);
    }
  };
  struct Part {
    static constexpr std::size_t kCount = 1;
    std::size_t place, count;
    template <class T>
    [[gnu::always_inline]] void load(const T* p, F32* x) const {
      x[0] = RowWalk::load(p + place, count);
    }
    template <class T>
    [[gnu::always_inline]] void store(T* p, const F32* x) const {
      RowWalk::store(p + place, x[0], count);
    }
    template <class T>
    [[gnu::always_inline]] void load_beside(const float* p, F32* x) const {
      load(p, x);
    }
  };
  // body(Pair or Part), in any order.
  template <class Body>
  [[gnu::always_inline]] static void each_pair(std::size_t size, Body body) {
    std::size_t i = 0;
    for (; i + 2 * kLanes <= size; i += 2 * kLanes) body(Pair{i});
    for (; i < size; i += kLanes) body(Part{i, lanes_left(size - i)});
  }

  // `count` elements and then zeros.
  template <class T>
  [[gnu::always_inline]] static F32 load(const T* p, std::size_t count) {
    return kLanes == 1 || count == kLanes ? L::load_as(p) : load_part(p, count);
  }
  template <class T>
  [[gnu::always_inline]] static void store(T* p, F32 x, std::size_t count) {
    if (kLanes == 1 || count == kLanes) return L::store_as(p, x);
    store_part(p, x, count);
  }
  template <class T>
  [[gnu::always_inline]] static void store_rounded(T* p, F32 x, std::size_t count) {
    if (kLanes == 1 || count == kLanes) return L::store_rounded(p, x);
    store_part(p, x, count);
  }
  // Calls: inlined at each end of a row they are most of what a compiler has to do.
  template <class T>
  [[gnu::noinline]] static F32 load_part(const T* p, std::size_t count) {
    T buffer[kLanes] = {};
    __builtin_memcpy(buffer, p, count * sizeof(T));
    return L::load_as(buffer);
  }
  template <class T>
  [[gnu::noinline]] static void store_part(T* p, F32 x, std::size_t count) {
    T buffer[kLanes];
    L::store_as(buffer, x);
    __builtin_memcpy(p, buffer, count * sizeof(T));
  }

  struct Sum {
    F32 lanes[kVectors];

    [[gnu::always_inline]] Sum() {
      each_of_block([&](std::size_t k) __attribute__((always_inline)) { lanes[k] = L::set(0.f); });
    }
    [[gnu::always_inline]] void add(std::size_t k, F32 x) { lanes[k] = L::add(lanes[k], x); }
    // Vectors in halves, then the lanes of the last one, as reduce_add does.
    [[gnu::always_inline]] float total() { return fold<kVectors / 2>(); }

   private:
    template <std::size_t kHalf>
    [[gnu::always_inline]] float fold() {
      if constexpr (kHalf > 0) {
        each_below<kHalf>([&](std::size_t k) __attribute__((always_inline)) {
          lanes[k] = L::add(lanes[k], lanes[k + kHalf]);
        });
        return fold<kHalf / 2>();
      } else {
        return L::reduce_add(lanes[0]);
      }
    }
  };
};

}  // namespace monograph
