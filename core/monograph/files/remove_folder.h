// Removes a folder and everything in it, through the seam that tests fail.
#pragma once

#include <filesystem>

#include "monograph/files/file_ops.h"

namespace monograph::files {

// Links are removed, not followed. False, with errno set, if something could not be removed; true
// if there is no such folder. Throws IoError if one cannot be listed.
bool remove_folder(const std::filesystem::path& folder, FileOps& ops);

}  // namespace monograph::files
