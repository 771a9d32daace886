// Directions of low-rank changes against what defines them, in fp64.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "monograph/merge/directions.h"
#include "monograph/merge/symmetric_eigen.h"

namespace monograph {
namespace {

LowRankFactors random_factors(std::size_t rows, std::size_t cols, std::size_t rank, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  LowRankFactors factors{rows, cols, rank, {}, {}};
  for (std::size_t i = 0; i < rows * rank; ++i) factors.left.push_back(normal(random));
  for (std::size_t i = 0; i < cols * rank; ++i) factors.right.push_back(normal(random));
  return factors;
}

double change(const LowRankFactors& f, std::size_t i, std::size_t j) {
  double sum = 0;
  for (std::size_t k = 0; k < f.rank; ++k) sum += f.left[i * f.rank + k] * f.right[j * f.rank + k];
  return sum;
}

// V has orthonormal columns, |change v| is s, the images of two directions are orthogonal, and the
// change has nothing beside V.
void check(const LowRankFactors& f, const Directions& d, std::size_t count) {
  ASSERT_EQ(d.count(), count);
  const std::size_t k = d.count();
  std::vector<double> image(f.rows * k);
  double all = 0, along = 0;
  for (std::size_t i = 0; i < f.rows; ++i) {
    for (std::size_t j = 0; j < f.cols; ++j) {
      const double x = change(f, i, j);
      all += x * x;
      for (std::size_t a = 0; a < k; ++a) image[i * k + a] += x * d.v[j * k + a];
    }
  }
  for (const double x : image) along += x * x;
  EXPECT_NEAR(along, all, 1e-9 * all);
  for (std::size_t a = 0; a < k; ++a) {
    for (std::size_t b = 0; b < k; ++b) {
      double dot = 0, of_images = 0;
      for (std::size_t j = 0; j < f.cols; ++j) dot += d.v[j * k + a] * d.v[j * k + b];
      for (std::size_t i = 0; i < f.rows; ++i) of_images += image[i * k + a] * image[i * k + b];
      EXPECT_NEAR(dot, a == b, 1e-8);
      EXPECT_NEAR(of_images, a == b ? d.s[a] * d.s[a] : 0, 1e-9 * d.s[0] * d.s[0]);
    }
    if (a > 0) EXPECT_LE(d.s[a], d.s[a - 1]);
  }
  const AlongDirections squares(d);
  std::vector<double> values(f.rows * f.cols);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = change(f, i / f.cols, i % f.cols);
  EXPECT_NEAR(squares.sum_of_squares(values), all, 1e-9 * all);
}

TEST(Directions, AreTheSingularVectorsOfTheChange) {
  for (const auto& [rows, cols, rank] :
       {std::array<std::size_t, 3>{40, 60, 1}, {40, 60, 5}, {33, 70, 17}, {3, 50, 8}}) {
    const LowRankFactors factors = random_factors(rows, cols, rank, 1);
    check(factors, find_directions(factors, serial_for), std::min(rows, rank));
  }
}

TEST(Directions, AreAtMostAsManyAsColumns) {
  const LowRankFactors factors = random_factors(30, 4, 9, 2);
  check(factors, find_directions(factors, serial_for), 4);
}

TEST(Directions, OfRepeatedFactorsAreCountedOnce) {
  LowRankFactors factors = random_factors(20, 30, 4, 3);
  for (std::size_t j = 0; j < 30; ++j) factors.right[4 * j + 3] = factors.right[4 * j];
  for (std::size_t i = 0; i < 20; ++i) factors.left[4 * i + 2] = 0;
  check(factors, find_directions(factors, serial_for), 2);
}

TEST(Directions, OfZerosAndOfBrokenFactorsThereAreNone) {
  LowRankFactors factors = random_factors(20, 30, 4, 4);
  factors.right[7] = NAN;
  EXPECT_EQ(find_directions(factors, serial_for).count(), 0u);
  std::fill(factors.right.begin(), factors.right.end(), 0.0);
  EXPECT_EQ(find_directions(factors, serial_for).count(), 0u);
}

TEST(Directions, AreTheSameBitsForAnyNumberOfThreads) {
  const LowRankFactors factors = random_factors(700, 900, 12, 5);
  const Directions wanted = find_directions(factors, serial_for);
  for (const int threads : {2, 3, 4}) {
    ThreadPool pool(threads);
    const Directions found =
        find_directions(factors, [&](std::size_t n, std::size_t grain, ParallelBody body) {
          pool.parallel_for(n, grain, body);
        });
    EXPECT_EQ(found.s, wanted.s);
    EXPECT_EQ(found.v, wanted.v);
  }
}

TEST(SymmetricEigen, SolvesAGradedMatrix) {
  // diag(4, 1, 1e-8) turned by two planes.
  const double c = 0.6, s = 0.8;
  const double q[3][3] = {{c, s, 0}, {-s * c, c * c, s}, {s * s, -c * s, c}};
  const double values[3] = {4, 1, 1e-8};
  std::vector<double> matrix(9);
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j)
      for (int k = 0; k < 3; ++k)
        matrix[static_cast<std::size_t>(3 * i + j)] += q[k][i] * values[k] * q[k][j];
  const SymmetricEigen found = symmetric_eigen(matrix, 3);
  for (std::size_t k = 0; k < 3; ++k) {
    EXPECT_NEAR(found.values[k], values[k], 1e-15 * 4);
    double dot = 0;
    for (std::size_t j = 0; j < 3; ++j) dot += found.vectors[3 * k + j] * q[k][j];
    EXPECT_NEAR(std::fabs(dot), 1, 1e-7);
  }
}

TEST(SymmetricEigen, SolvesMatricesOfEverySize) {
  for (const std::size_t size : {1, 2, 3, 5, 16, 33, 70}) {
    for (const std::size_t rank : {size, (size + 1) / 2}) {
      std::mt19937 random(static_cast<unsigned>(size));
      std::normal_distribution<double> normal;
      std::vector<double> x(size * rank), matrix(size * size);
      for (double& value : x) value = 1e120 * normal(random);
      for (std::size_t i = 0; i < size; ++i)
        for (std::size_t j = 0; j < size; ++j)
          for (std::size_t k = 0; k < rank; ++k)
            matrix[i * size + j] += x[i * rank + k] * x[j * rank + k];
      const SymmetricEigen found = symmetric_eigen(matrix, size);
      const double allowed = 1e-14 * static_cast<double>(size);
      for (std::size_t a = 0; a < size; ++a) {
        const double* v = found.vectors.data() + a * size;
        if (a > 0) EXPECT_LE(found.values[a], found.values[a - 1]);
        if (a >= rank) EXPECT_NEAR(found.values[a] / found.values[0], 0, allowed);
        for (std::size_t i = 0; i < size; ++i) {
          double image = 0;
          for (std::size_t j = 0; j < size; ++j) image += matrix[i * size + j] * v[j];
          EXPECT_NEAR(image / found.values[0], found.values[a] / found.values[0] * v[i], allowed);
        }
        for (std::size_t b = 0; b < size; ++b) {
          double dot = 0;
          for (std::size_t j = 0; j < size; ++j) dot += v[j] * found.vectors[b * size + j];
          EXPECT_NEAR(dot, a == b, allowed);
        }
      }
    }
  }
  const SymmetricEigen zero = symmetric_eigen(std::vector<double>(9), 3);
  EXPECT_EQ(zero.values, std::vector<double>(3));
}

}  // namespace
}  // namespace monograph
