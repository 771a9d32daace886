#include "monograph/merge/symmetric_eigen.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace monograph {
namespace {

// Only operations that IEEE 754 rounds in one way: the bits are those of every machine. No sum but
// the short dots runs along a row, so that rows are vectors.

constexpr int kMostSteps = 60;  // of one eigenvalue; two or three are usual
constexpr double kNegligible = 0x1p-53;

double dot(const double* x, const double* y, std::size_t count) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

void add(double factor, const double* x, std::size_t count, double* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] += factor * x[i];
}

// T = Q^T A Q with three diagonals: its diagonal, the one beside it, and the rows of Q^T.
struct Tridiagonal {
  std::vector<double> diagonal, beside, rows;
};

// Householder's reflections, column by column.
Tridiagonal tridiagonal(std::vector<double> a, std::size_t size) {
  Tridiagonal t{std::vector<double>(size), std::vector<double>(size),
                std::vector<double>(size * size)};
  for (std::size_t i = 0; i < size; ++i) t.rows[i * size + i] = 1;
  std::vector<double> v(size), w(size);
  for (std::size_t k = 0; k + 2 < size; ++k) {
    const std::size_t begin = k + 1, count = size - begin;
    std::copy_n(a.data() + k * size + begin, count, v.data());
    const double length = std::sqrt(dot(v.data(), v.data(), count));
    t.beside[k] = std::copysign(length, -v[0]);
    if (dot(v.data() + 1, v.data() + 1, count - 1) == 0) {
      t.beside[k] = v[0];
      continue;
    }
    v[0] -= t.beside[k];
    const double beta = 2 / dot(v.data(), v.data(), count);
    std::fill(w.begin(), w.end(), 0.0);
    for (std::size_t i = 0; i < count; ++i) {
      add(beta * v[i], a.data() + (begin + i) * size + begin, count, w.data());
    }
    add(-beta / 2 * dot(w.data(), v.data(), count), v.data(), count, w.data());
    for (std::size_t i = 0; i < count; ++i) {
      double* row = a.data() + (begin + i) * size + begin;
      for (std::size_t j = 0; j < count; ++j) row[j] -= v[i] * w[j] + w[i] * v[j];
    }
    std::fill(w.begin(), w.end(), 0.0);
    for (std::size_t i = 0; i < count; ++i) {
      add(v[i], t.rows.data() + (begin + i) * size, size, w.data());
    }
    for (std::size_t i = 0; i < count; ++i) {
      add(-beta * v[i], w.data(), size, t.rows.data() + (begin + i) * size);
    }
  }
  for (std::size_t i = 0; i < size; ++i) t.diagonal[i] = a[i * size + i];
  if (size > 1) t.beside[size - 2] = a[(size - 2) * size + size - 1];
  return t;
}

// One step of the QL method with an implicit shift on rows [first, last] of T.
void step(Tridiagonal& t, std::size_t size, std::size_t first, std::size_t last) {
  std::vector<double>&d = t.diagonal, &e = t.beside;
  const double half = (d[first + 1] - d[first]) / (2 * e[first]);
  double g =
      d[last] - d[first] + e[first] / (half + std::copysign(std::sqrt(half * half + 1), half));
  double s = 1, c = 1, shift = 0;
  for (std::size_t i = last; i-- > first;) {
    const double f = s * e[i], b = c * e[i], r = std::sqrt(f * f + g * g);
    e[i + 1] = r;
    if (r == 0) {  // the block falls apart here
      d[i + 1] -= shift;
      e[last] = 0;
      return;
    }
    s = f / r;
    c = g / r;
    g = d[i + 1] - shift;
    const double turned = (d[i] - g) * s + 2 * c * b;
    shift = s * turned;
    d[i + 1] = g + shift;
    g = c * turned - b;
    double *upper = t.rows.data() + i * size, *lower = upper + size;
    for (std::size_t j = 0; j < size; ++j) {
      const double x = upper[j], y = lower[j];
      upper[j] = c * x - s * y;
      lower[j] = s * x + c * y;
    }
  }
  d[first] -= shift;
  e[first] = g;
  e[last] = 0;
}

}  // namespace

SymmetricEigen symmetric_eigen(std::vector<double> matrix, std::size_t size) {
  double largest = 0;
  for (const double x : matrix) largest = std::max(largest, std::fabs(x));
  // A power of two: nothing is rounded, and no square leaves the range.
  const double unit = largest > 0 ? std::ldexp(1.0, std::ilogb(largest)) : 1;
  for (double& x : matrix) x /= unit;
  Tridiagonal t = tridiagonal(std::move(matrix), size);
  for (std::size_t first = 0; first < size; ++first) {
    for (int steps = 0; steps < kMostSteps; ++steps) {
      std::size_t last = first;
      while (last + 1 < size &&
             std::fabs(t.beside[last]) >
                 kNegligible * (std::fabs(t.diagonal[last]) + std::fabs(t.diagonal[last + 1]))) {
        ++last;
      }
      if (last == first) break;
      step(t, size, first, last);
    }
  }
  std::vector<std::size_t> order(size);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t x, std::size_t y) { return t.diagonal[x] > t.diagonal[y]; });
  SymmetricEigen result;
  for (const std::size_t i : order) {
    result.values.push_back(t.diagonal[i] * unit);
    const double* row = t.rows.data() + i * size;
    result.vectors.insert(result.vectors.end(), row, row + size);
  }
  return result;
}

}  // namespace monograph
