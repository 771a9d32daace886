#include "monograph/merge/calibration.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/experts.h"

namespace monograph {
namespace {

using safetensors::StoredDType;
using safetensors::TensorEntry;
using text::in_quotes;

constexpr std::string_view kSketch = ".sketch", kDiagonal = ".diagonal";
// Of the mean of the diagonal.
constexpr double kLeastDiagonal = 0.01;
// Nystroem's approximation never exceeds the matrix: the squares of a column of the sketch sum up
// to its diagonal at most. Rounding of float32 sums was 3e-7 of it, on spectra that fall below the
// least eigenvalue that is kept (tests/python/hf/test_calibration.py); an eighth is no other
// result.
constexpr double kMostSketched = 1.125;

float load(const std::uint8_t* bytes, std::size_t index) {
  float value;
  std::memcpy(&value, bytes + index * sizeof value, sizeof value);
  return value;
}

std::string without_ending(std::string_view name, std::string_view ending) {
  if (name.ends_with(ending)) name.remove_suffix(ending.size());
  return std::string(name);
}

// What the file may call the inputs of a weight; first come, first served.
std::vector<std::string> module_names(std::string_view weight) {
  std::vector<std::string> names = {without_ending(weight, ".weight")};
  for (std::string& name : parameter_names(weight)) names.push_back(std::move(name));
  return names;
}

}  // namespace

InputMoments CalibratedInputs::moments() const {
  InputMoments moments{count, std::vector<double>(inputs * count), std::vector<double>(inputs)};
  double mean = 0;
  for (std::size_t i = 0; i < inputs; ++i) mean += double{load(diagonal, i)};
  mean /= static_cast<double>(inputs);
  const double factor = 1 / std::sqrt(mean);
  for (std::size_t i = 0; i < inputs; ++i) {
    double sketched = 0;
    for (std::size_t k = 0; k < count; ++k) {
      const double value = factor * load(sketch, k * inputs + i);
      moments.g[i * count + k] = value;
      sketched += value * value;
    }
    moments.d[i] = std::max(load(diagonal, i) / mean - sketched, 0.0) + kLeastDiagonal;
  }
  return moments;
}

Calibration::Calibration(const std::filesystem::path& file)
    : reader_(std::make_unique<safetensors::Reader>(file)) {
  const safetensors::Metadata& metadata = reader_->header().metadata;
  const auto version = metadata.find("monograph.calibration");
  if (version == metadata.end() || version->second != "1") {
    throw Error(file.string() + ": metadata \"monograph.calibration\" is " +
                (version == metadata.end() ? "missing" : in_quotes(version->second)) +
                ", wanted \"1\"");
  }
  for (const TensorEntry& entry : reader_->header().tensors) {
    if (entry.name.ends_with(kSketch)) {
      add(without_ending(entry.name, kSketch));
    } else if (!entry.name.ends_with(kDiagonal)) {
      fail(entry.name, "is neither MODULE.sketch nor MODULE.diagonal");
    } else if (const std::string module = without_ending(entry.name, kDiagonal);
               reader_->find(module + std::string(kSketch)) == nullptr) {
      fail(entry.name, "has no " + in_quotes(module + std::string(kSketch)) + " beside it");
    }
  }
}

void Calibration::fail(std::string_view tensor, const std::string& what) const {
  throw Error(file().string() + ": tensor " + in_quotes(tensor) + ": " + what);
}

void Calibration::add(const std::string& module) {
  const TensorEntry& sketch = *reader_->find(module + std::string(kSketch));
  const TensorEntry* diagonal = reader_->find(module + std::string(kDiagonal));
  if (diagonal == nullptr) {
    fail(sketch.name, "has no " + in_quotes(module + std::string(kDiagonal)) + " beside it");
  }
  for (const TensorEntry* entry : {&sketch, diagonal}) {
    if (entry->dtype == StoredDType::kF32) continue;
    fail(entry->name, "has type " + std::string(short_name(entry->dtype)) + ", wanted F32");
  }
  if (sketch.shape.size() != 2 || sketch.shape[0] > kMaxSketchRows || sketch.elements == 0) {
    fail(sketch.name, "has shape " + safetensors::shape_text(sketch.shape) + ", wanted [1 to " +
                          std::to_string(kMaxSketchRows) + ", inputs]");
  }
  if (diagonal->shape != std::vector<std::uint64_t>{sketch.shape[1]}) {
    fail(diagonal->name, "has shape " + safetensors::shape_text(diagonal->shape) + ", wanted [" +
                             std::to_string(sketch.shape[1]) + "] as the sketch has inputs");
  }
  const CalibratedInputs inputs{sketch.shape[1], sketch.shape[0], reader_->bytes(sketch).data(),
                                reader_->bytes(*diagonal).data()};
  const auto check = [&](const TensorEntry& entry, const std::uint8_t* bytes, float least) {
    for (std::size_t i = 0; i < entry.elements; ++i) {
      const float value = load(bytes, i);
      if (std::isfinite(value) && value >= least) continue;
      fail(entry.name,
           "element " + std::to_string(i) + " is " + std::to_string(value) +
               (std::isfinite(value) ? ", wanted a mean of squares" : ", wanted a finite number"));
    }
  };
  check(sketch, inputs.sketch, -INFINITY);
  check(*diagonal, inputs.diagonal, 0.0f);
  check_agreement(sketch.name, inputs);
  modules_.emplace(module, inputs);
}

void Calibration::check_agreement(std::string_view sketch, const CalibratedInputs& inputs) const {
  std::vector<double> sketched(inputs.inputs);
  double mean = 0;
  for (std::size_t k = 0; k < inputs.count; ++k) {
    for (std::size_t i = 0; i < inputs.inputs; ++i) {
      const double value = load(inputs.sketch, k * inputs.inputs + i);
      sketched[i] += value * value;
    }
  }
  for (std::size_t i = 0; i < inputs.inputs; ++i) mean += double{load(inputs.diagonal, i)};
  mean /= static_cast<double>(inputs.inputs);
  for (std::size_t i = 0; i < inputs.inputs; ++i) {
    const double diagonal = load(inputs.diagonal, i);
    // An excess below what every diagonal is raised by changes nothing.
    if (sketched[i] <= kMostSketched * diagonal + kLeastDiagonal * mean) continue;
    fail(sketch, "the squares of column " + std::to_string(i) + " sum up to " +
                     std::to_string(sketched[i]) + ", wanted at most its diagonal, " +
                     std::to_string(diagonal) + ": they are not of the same inputs");
  }
}

std::string Calibration::base_sha256() const {
  const auto found = reader_->header().metadata.find("monograph.base_sha256");
  return found == reader_->header().metadata.end() ? "" : found->second;
}

const CalibratedInputs* Calibration::find(std::string_view weight) const {
  for (const std::string& name : module_names(weight)) {
    const auto found = modules_.find(name);
    if (found == modules_.end()) continue;
    const CalibratedInputs& inputs = found->second;
    for (std::size_t i = 0; i < inputs.inputs; ++i) {
      if (load(inputs.diagonal, i) > 0) return &inputs;
    }
    return nullptr;
  }
  return nullptr;
}

std::string Calibration::module_beside(const std::vector<std::string_view>& weights) const {
  std::set<std::string, std::less<>> known;
  for (const std::string_view weight : weights) {
    for (std::string& name : module_names(weight)) known.insert(std::move(name));
  }
  for (const auto& [module, inputs] : modules_) {
    if (!known.contains(module)) return module;
  }
  return {};
}

const CalibratedInputs* Calibration::find(std::string_view weight, std::size_t inputs) const {
  const CalibratedInputs* found = find(weight);
  if (found == nullptr || found->inputs == inputs) return found;
  throw Error(file().string() + ": for weight " + in_quotes(weight) + ": has a sketch of " +
              std::to_string(found->inputs) + " inputs, the weight has " + std::to_string(inputs));
}

}  // namespace monograph
