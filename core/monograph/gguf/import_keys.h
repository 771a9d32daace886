// The pairs of a GGUF file that belong to its architecture, and its tensors, with errors that name
// the file. A step of import_config.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/gguf/file_reader.h"
#include "monograph/text/json_document.h"

namespace monograph::gguf {

json::Value whole(std::uint64_t value);
// The decimal number of which `value` is the nearest float32: 1e-05, not 9.9999997e-06.
double shortest(double value);

class ArchitectureKeys {
 public:
  explicit ArchitectureKeys(const FileReader& file) : file_(file), header_(file.header()) {}

  const FileHeader& header() const { return header_; }
  [[noreturn]] void fail(const std::string& what) const;
  std::string key_of(std::string_view key) const;  // "llama.context_length"
  const PairView* find(std::string_view key) const;
  // A whole number from 1 on, or any positive one; `otherwise` where there is none, unless 0.
  std::uint64_t count(std::string_view key, std::uint64_t otherwise = 0) const;
  double number(std::string_view key, double otherwise = 0) const;
  const TensorInfo& tensor(const std::string& name, std::size_t dimensions) const;
  void must_be(const std::string& what, std::uint64_t found, std::uint64_t wanted) const;
  // A tensor of this many numbers in f32.
  std::vector<float> floats(const TensorInfo& info, std::uint64_t wanted) const;

 protected:
  const FileReader& file_;
  const FileHeader& header_;
};

}  // namespace monograph::gguf
