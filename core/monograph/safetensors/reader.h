// One safetensors file, mapped: tensors are views of the page cache, nothing is copied.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

#include "monograph/files/mapped_file.h"
#include "monograph/safetensors/header.h"

namespace monograph::safetensors {

class Reader {
 public:
  // Maps the file and holds its header to every rule. Throws Error or IoError.
  explicit Reader(const std::filesystem::path& path);
  // The same of a path that was resolved and checked; path() is the name it had.
  Reader(const std::filesystem::path& resolved, std::filesystem::path shown);

  const std::filesystem::path& path() const { return path_; }
  const Header& header() const { return header_; }
  files::FileId id() const { return file_.id(); }
  const TensorEntry* find(std::string_view name) const { return header_.find(name); }
  // The bytes of an entry of this reader's header; valid while the reader lives. They lie at any
  // alignment: the format pads the header, but not every writer does.
  std::span<const std::uint8_t> bytes(const TensorEntry& entry) const {
    return file_.bytes().subspan(entry.offset_bytes, entry.size_bytes);
  }
  std::span<const std::uint8_t> all_bytes() const { return file_.bytes(); }

 private:
  std::filesystem::path path_;
  files::MappedFile file_;
  Header header_;
};

}  // namespace monograph::safetensors
