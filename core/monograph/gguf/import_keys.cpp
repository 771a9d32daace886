#include "monograph/gguf/import_keys.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "monograph/base/error.h"
#include "monograph/gguf/decode_blocks.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {

using text::in_quotes;

json::Value whole(std::uint64_t value) {
  return json::Value::number(static_cast<std::int64_t>(value));
}

double shortest(double value) {
  std::array<char, 32> text{};
  const auto end =
      std::to_chars(text.data(), text.data() + text.size() - 1, static_cast<float>(value)).ptr;
  *end = 0;
  return std::strtod(text.data(), nullptr);
}

void ArchitectureKeys::fail(const std::string& what) const {
  throw Error(file_.path().string() + ": " + what);
}

std::string ArchitectureKeys::key_of(std::string_view key) const {
  return std::string(header_.architecture()) + "." + std::string(key);
}

const PairView* ArchitectureKeys::find(std::string_view key) const {
  return header_.find(key_of(key));
}

std::uint64_t ArchitectureKeys::count(std::string_view key, std::uint64_t otherwise) const {
  const PairView* pair = find(key);
  if (pair == nullptr && otherwise != 0) return otherwise;
  const std::uint64_t found = pair == nullptr ? 0 : pair->whole().value_or(0);
  if (found == 0 || found > UINT32_MAX) {
    fail(key_of(key) + " is " +
         (pair == nullptr ? "missing"
          : pair->whole() ? std::to_string(found)
                          : "something else") +
         ", wanted a whole number from 1 to 2^32 - 1");
  }
  return found;
}

double ArchitectureKeys::number(std::string_view key, double otherwise) const {
  const PairView* pair = find(key);
  if (pair == nullptr && otherwise != 0) return otherwise;
  const double found = pair == nullptr ? 0 : pair->number().value_or(0);
  if (!(found > 0) || !std::isfinite(found)) {
    fail(key_of(key) + " is " +
         (pair == nullptr  ? "missing"
          : pair->number() ? std::to_string(found)
                           : "no number") +
         ", wanted a positive number");
  }
  return pair->type == ValueType::kF64 ? found : shortest(found);
}

const TensorInfo& ArchitectureKeys::tensor(const std::string& name, std::size_t dimensions) const {
  const TensorInfo* found = header_.find_tensor(name);
  if (found == nullptr || found->shape.size() != dimensions) {
    fail("tensor " + in_quotes(name) + " is " +
         (found == nullptr ? "missing" : "of " + std::to_string(found->shape.size())) +
         ", wanted one of " + std::to_string(dimensions) + " dimensions");
  }
  return *found;
}

void ArchitectureKeys::must_be(const std::string& what, std::uint64_t found,
                               std::uint64_t wanted) const {
  if (found == wanted) return;
  fail(what + " is " + std::to_string(found) + ", by the tensors " + std::to_string(wanted));
}

std::vector<float> ArchitectureKeys::floats(const TensorInfo& info, std::uint64_t wanted) const {
  if (info.type != TensorType::kF32 || info.shape.size() != 1 || info.shape[0] != wanted) {
    fail(std::string(info.name) + ": wanted " + std::to_string(wanted) + " numbers of f32");
  }
  std::vector<float> found(wanted);
  decode(TensorType::kF32, file_.bytes(info).data(), found.size(), found.data());
  return found;
}

}  // namespace monograph::gguf
