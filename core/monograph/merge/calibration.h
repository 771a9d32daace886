// What the inputs of linear layers are like, from a file that training wrote beside its adapter:
//   MODULE.sketch     F32 [k, inputs], k <= 64: sketch^T sketch is about the mean over tokens of x
//   x^T MODULE.diagonal   F32 [inputs]: the mean over tokens of x_i^2 metadata
//   "monograph.calibration": "1", "monograph.tokens", "monograph.base_sha256"
// MODULE is the name of a weight without ".weight", or that of the parameter of a stack of experts.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/safetensors/reader.h"

namespace monograph {

inline constexpr const char* kCalibrationFile = "calibration.safetensors";
inline constexpr std::size_t kMaxSketchRows = 64;

// H = diag(d) + g g^T is about x x^T scaled to a mean diagonal of 1; d is what the sketch leaves of
// the diagonal, and at least 0.01.
struct InputMoments {
  std::size_t count = 0;
  std::vector<double> g;  // inputs x count
  std::vector<double> d;  // inputs
};

// Of one module; valid while the Calibration lives.
struct CalibratedInputs {
  std::size_t inputs = 0, count = 0;
  const std::uint8_t *sketch = nullptr, *diagonal = nullptr;

  InputMoments moments() const;
};

class Calibration {
 public:
  // Throws Error naming the tensor: another version, a module without one of its two tensors, a
  // type or shape other than those above, a number that is not finite, a negative diagonal, a
  // sketch that contradicts its diagonal.
  explicit Calibration(const std::filesystem::path& file);

  const std::filesystem::path& file() const { return reader_->path(); }
  // Empty if the file does not say.
  std::string base_sha256() const;
  // By the name of a weight of a checkpoint: a matrix, a stack of experts, or one of them, for
  // which the file has what all experts share. nullptr if there is none, or no token came by.
  const CalibratedInputs* find(std::string_view weight) const;
  // The same for a weight with that many inputs; throws Error if the file has another number.
  const CalibratedInputs* find(std::string_view weight, std::size_t inputs) const;
  // A module of the file that belongs to none of these weights of a checkpoint, the first by its
  // name; empty if all do.
  std::string module_beside(const std::vector<std::string_view>& weights) const;

 private:
  [[noreturn]] void fail(std::string_view tensor, const std::string& what) const;
  void add(const std::string& module);
  void check_agreement(std::string_view sketch, const CalibratedInputs& inputs) const;

  std::unique_ptr<safetensors::Reader> reader_;  // does not move
  std::map<std::string, CalibratedInputs, std::less<>> modules_;
};

}  // namespace monograph
