#include "monograph/safetensors/reader.h"

#include <utility>

namespace monograph::safetensors {

Reader::Reader(const std::filesystem::path& path)
    : path_(path),
      file_(path),
      header_(parse_header(file_.bytes(), file_.bytes().size(), path_.string())) {}

Reader::Reader(const std::filesystem::path& resolved, std::filesystem::path shown)
    : path_(std::move(shown)),
      file_(resolved, path_),
      header_(parse_header(file_.bytes(), file_.bytes().size(), path_.string())) {}

}  // namespace monograph::safetensors
