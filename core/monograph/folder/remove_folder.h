// Removes a folder and everything in it, through the seam that tests fail.
#pragma once

#include <filesystem>

#include "monograph/safetensors/file_ops.h"

namespace monograph {

// Links are removed, not followed. False, with errno set, if something could not be removed; true
// if there is no such folder. Throws IoError if one cannot be listed.
bool remove_folder(const std::filesystem::path& folder, safetensors::FileOps& ops);

}  // namespace monograph
