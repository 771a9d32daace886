// A decoded weight beside the packed one: what tests of bits multiply with instead.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "monograph/base/float_types.h"
#include "monograph/kernels/linear/tests/product.h"
#include "monograph/kernels/linear/tests/random_elements.h"

namespace monograph {

using Bytes = std::vector<std::uint8_t>;

// The suite runs once per set, so lower ones are not walked again; AVX-512 is, for what AMX leaves
// to it.
template <class Body>
void for_each_linear_variant(Body body) {
  for (const LinearVariant& variant : linear_variants()) {
    if (variant.isa > best_isa() || variant.isa < std::min(best_isa(), Isa::kAvx512)) continue;
    SCOPED_TRACE(std::string(name_of(variant.isa)) + " " + name_of(variant.dtype) +
                 (variant.pass == Pass::kForward ? " forward" : " dx"));
    body(*variant.run, variant.dtype, variant.pass);
  }
}

// Elements rounded to the type.
inline Bytes rounded_elements(const std::vector<float>& elements, DType dtype) {
  Bytes out(elements.size() * size_bytes(dtype));
  with_type(dtype, [&]<class T>() {
    for (std::size_t i = 0; i < elements.size(); ++i) {
      const T element = from_float<T>(elements[i]);
      std::memcpy(out.data() + i * sizeof(T), &element, sizeof(T));
    }
  });
  return out;
}

inline LinearWeight plain_weight(const Bytes& elements, std::size_t rows, std::size_t cols,
                                 DType dtype) {
  LinearWeight weight;
  weight.packed.rows = rows;
  weight.packed.cols = cols;
  weight.packed.values = elements.data();
  weight.dtype = dtype;
  return weight;
}

// W is a GroupWeight or a GgmlWeight: its product has the bits of that of its elements.
template <class W>
void check_product_bits(const W& w, std::initializer_list<std::size_t> batches) {
  for_each_linear_variant([&](const LinearKernels& kernels, DType dtype, Pass pass) {
    const Bytes dense = rounded_elements(w.elements, dtype);
    const std::size_t in = pass == Pass::kForward ? w.cols : w.rows;
    for (const std::size_t m : batches) {
      const Bytes left = random_elements(dtype, m * in, 2);
      const Bytes want =
          product(kernels, dtype, pass, left, m, plain_weight(dense, w.rows, w.cols, dtype));
      const Bytes got = product(kernels, dtype, pass, left, m, {w.view});
      ASSERT_EQ(got, want) << m << " rows";
    }
  });
}

}  // namespace monograph
