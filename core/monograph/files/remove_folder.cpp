#include "monograph/files/remove_folder.h"

#include <cerrno>
#include <system_error>

#include "monograph/files/list_folder.h"

namespace monograph::files {

namespace fs = std::filesystem;

bool remove_folder(const fs::path& folder, FileOps& ops) {
  std::error_code error;
  int code = 0;
  if (!fs::is_directory(fs::symlink_status(folder, error))) {
    errno = ENOTDIR;
    return !fs::exists(fs::symlink_status(folder, error));
  }
  for (const std::string& name : list_folder(folder)) {
    const fs::path path = folder / name;
    const bool is_folder = fs::is_directory(fs::symlink_status(path, error));
    const bool gone = is_folder ? remove_folder(path, ops) : ops.unlink(path.c_str()) == 0;
    if (!gone && errno != ENOENT) code = errno;
  }
  if (code == 0 && ops.rmdir(folder.c_str()) != 0 && errno != ENOENT) code = errno;
  errno = code;
  return code == 0;
}

}  // namespace monograph::files
