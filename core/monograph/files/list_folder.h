// The names in a folder. Not std::filesystem::directory_iterator: libstdc++ ends the process when
// memory runs out inside it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace monograph::files {

// Sorted, without "." and "..". Throws IoError if the folder cannot be read.
std::vector<std::string> list_folder(const std::filesystem::path& folder);

}  // namespace monograph::files
